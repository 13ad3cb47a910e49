"""Loading: asked for, not asked for, switched off, and beside an SGLang that is not the right one."""

import logging
import sys

import pytest
from sgl_graft.patches import ContractError, Patch, contract

from sgl_graft import plugin
from sgl_graft.algorithms import ALGORITHM_VARIABLE
from sgl_graft.config import CONFIG_VARIABLE
from sgl_graft.cpu import entry

Applied = list[list[Patch]]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (plugin.DISABLE_VARIABLE, ALGORITHM_VARIABLE, CONFIG_VARIABLE, "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["launch_server"])


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Applied:
    """Records instead of hooking SGLang in the process that runs the tests."""
    calls: Applied = []
    monkeypatch.setattr(plugin, "register", lambda patches: calls.append(list(patches)))
    return calls


def ask(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", *words])


def test_not_asked_for_it_adds_its_flag_and_names_only(applied: Applied) -> None:
    plugin.load()
    (patches,) = applied
    assert {patch.feature for patch in patches} == {"names"}
    assert {patch.stage for patch in patches} == {"load"}
    assert "sglang.srt.server_args.ServerArgs.add_cli_args" in {patch.target for patch in patches}


@pytest.mark.parametrize(
    "words",
    [
        ("--speculative-algorithm", "GRAFT"),
        ("--speculative-algorithm=graft",),
        ("--speculative-algorithm", "BLOCKPILOT"),
        ("--graft-config", "x.yaml"),
        ("--graft-config=x.yaml",),
    ],
)
def test_it_knows_when_it_is_asked_for(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plugin.selected()
    ask(monkeypatch, *words)
    assert plugin.selected()


@pytest.mark.parametrize("variable", [ALGORITHM_VARIABLE, CONFIG_VARIABLE])
def test_a_child_knows_from_its_parent(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "GRAFT")
    assert plugin.selected()


def test_the_engines_own_algorithms_do_not_select_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, "--speculative-algorithm", "EAGLE3", "--model-path", "/models/GRAFT-7B")
    assert not plugin.selected()


def test_another_release_stays_out_with_a_warning(
    applied: Applied, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "version", lambda _name: "0.5.24")
    with caplog.at_level(logging.WARNING):
        plugin.load()
    assert applied == []
    assert "stays out" in caplog.text
    assert "pip install 'sglang==0.5.23'" in caplog.text


def test_another_release_is_refused_when_asked_for(applied: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda _name: "0.5.24")
    ask(monkeypatch, "--speculative-algorithm", "GRAFT")
    with pytest.raises(SystemExit) as stop:
        plugin.load()
    assert "0.5.24 is installed" in str(stop.value.code)
    assert applied == []


def change_upstream(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    original = contract.fingerprint
    changed = "0" * 16
    monkeypatch.setattr(contract, "fingerprint", lambda name: changed if name == target else original(name))


def worker_target() -> str:
    """A function that only exists in a process started later."""
    return next(p.target for p in plugin.patches_of("cpu") if p.stage == "worker")


def test_a_changed_function_is_refused_when_asked_for(
    applied: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [patch.target for patch in plugin.patches_of("names", "graft")]
    for target in targets:
        with monkeypatch.context() as scoped:
            change_upstream(scoped, target)
            ask(scoped, "--speculative-algorithm", "GRAFT")
            with pytest.raises(SystemExit) as stop:
                plugin.load()
        assert target in str(stop.value.code)
        assert "Reinstall stock sglang==0.5.23" in str(stop.value.code)
    assert applied == []


def test_a_changed_function_warns_when_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(patches: list[Patch]) -> None:
        raise ContractError("ServerArgs.add_cli_args has changed")

    monkeypatch.setattr(plugin, "register", refuse)
    with caplog.at_level(logging.WARNING):
        plugin.load()
    assert "add_cli_args has changed" in caplog.text


def test_asked_for_it_adds_what_selects_its_worker(applied: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, "--speculative-algorithm", "GRAFT")
    plugin.load()
    (patches,) = applied
    assert {patch.feature for patch in patches} == {"names", *plugin.FEATURES}
    assert {patch.stage for patch in patches} == {"load"}


def test_switched_off_it_does_nothing(applied: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.DISABLE_VARIABLE, "1")
    monkeypatch.setattr(plugin, "version", lambda _name: "0.5.24")
    ask(monkeypatch, "--speculative-algorithm", "GRAFT")
    plugin.load()
    assert applied == []
    assert entry.activate() is None


@pytest.mark.parametrize("value", ["", "0"])
def test_zero_does_not_switch_it_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.DISABLE_VARIABLE, value)
    assert not plugin.disabled()


class TestCpuPlatform:
    @pytest.fixture(autouse=True)
    def no_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # activation sets it; put it back afterwards
        monkeypatch.setattr(entry, "_accelerator_present", lambda: False)

    def test_it_is_used_where_there_is_no_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert entry.activate() == entry.PLATFORM
        monkeypatch.setattr(entry, "_accelerator_present", lambda: True)
        assert entry.activate() is None
        monkeypatch.setenv("SGLANG_PLATFORM", "sgl_graft_cpu")
        assert entry.activate() == entry.PLATFORM

    def test_another_release_stays_out(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(plugin, "version", lambda _name: "0.5.24")
        with caplog.at_level(logging.WARNING):
            assert entry.activate() is None
        assert "0.5.24 is installed" in caplog.text

    def test_another_release_is_refused_when_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugin, "version", lambda _name: "0.5.24")
        monkeypatch.setenv("SGLANG_PLATFORM", "sgl_graft_cpu")
        with pytest.raises(SystemExit):
            entry.activate()

    def test_a_changed_function_is_refused_when_a_tree_is_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stock SGLang cannot speculate on a CPU: without this, its own failure would hide the reason."""
        change_upstream(monkeypatch, worker_target())
        ask(monkeypatch, "--speculative-algorithm", "EAGLE3")
        with pytest.raises(SystemExit) as stop:
            entry.activate()
        assert worker_target() in str(stop.value.code)

    def test_a_changed_function_stays_out_when_nothing_is_asked_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        change_upstream(monkeypatch, worker_target())
        with caplog.at_level(logging.WARNING):
            assert entry.activate() is None
        assert worker_target() in caplog.text
