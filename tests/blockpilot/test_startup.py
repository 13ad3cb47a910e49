"""What BLOCKPILOT refuses before a model is loaded, and the slots it asks SGLang for."""

import json
from types import SimpleNamespace

import pytest
import torch

from sgl_graft.blockpilot import startup
from sgl_graft.blockpilot.policy_file import PolicyDocument, write_policy
from sgl_graft.blockpilot.predictor import Predictor
from sgl_graft.blockpilot.startup import check_blockpilot, settle_slots
from sgl_graft.config import load_config_text


@pytest.fixture
def draft(tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 6,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def use(monkeypatch):
    def configure(**section):
        text = json.dumps({"blockpilot": section})
        monkeypatch.setattr(startup, "current_config", lambda: load_config_text(text))

    configure()
    return configure


def arguments(draft, **changed):
    values = {
        "speculative_num_draft_tokens": None,
        "speculative_dflash_block_size": None,
        "speculative_draft_model_path": str(draft),
        "speculative_adaptive": False,
        "enable_dp_attention": False,
        "enable_lora": False,
        "grammar_backend": None,
        "model_path": "someone/somewhere",
        "trust_remote_code": False,
        "disaggregation_mode": "null",
    }
    return SimpleNamespace(**values | changed)


def test_a_tail_needs_a_prefill_of_its_own(draft, use):
    use(tail_graft=True)
    check_blockpilot(arguments(draft, speculative_num_draft_tokens=8))
    with pytest.raises(ValueError, match="tail_graft cannot run with --disaggregation-mode decode"):
        check_blockpilot(arguments(draft, speculative_num_draft_tokens=8, disaggregation_mode="decode"))


def test_a_file_that_could_not_be_written_is_refused_at_start(draft, use, tmp_path):
    use(tail_graft=True, collect=str(tmp_path / "no" / "counters.json"))
    with pytest.raises(ValueError, match=r"blockpilot.collect .* cannot be written"):
        check_blockpilot(arguments(draft, speculative_num_draft_tokens=8))


def test_slots_make_room_for_the_largest_candidate(draft, use):
    args = arguments(draft)
    settle_slots(args)
    assert args.speculative_num_draft_tokens == 8
    shape = check_blockpilot(args)
    assert (shape.default, shape.candidates) == (6, (4, 5, 6, 7, 8))


@pytest.mark.parametrize("flag", ["speculative_num_draft_tokens", "speculative_dflash_block_size"])
def test_slots_that_were_given_stay(draft, use, flag):
    args = arguments(draft, **{flag: 7})
    settle_slots(args)
    assert getattr(args, flag) == 7
    assert check_blockpilot(args).b_max == 7


def test_a_draft_on_a_hub_is_not_read(use):
    args = arguments("someone/a-draft")
    settle_slots(args)
    assert args.speculative_num_draft_tokens == 18


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_num_draft_tokens": 1}, "at least 2 slots"),
    ],
)
def test_arguments_that_cannot_work_are_named(draft, use, changes, message):
    with pytest.raises(ValueError, match=message):
        check_blockpilot(arguments(draft, **changes))


def test_files_that_were_named_must_be_there(draft, use, tmp_path):
    for section, message in (
        ({"policy_file": str(tmp_path / "no.json")}, r"no\.json cannot be used"),
        ({"policy_file": str(tmp_path / "no.pt")}, r"no\.pt cannot be read"),
        ({"policy": "replay", "policy_file": str(tmp_path / "no.json")}, "replay file"),
        ({"costs": str(tmp_path / "no.json")}, "cost table"),
        ({"policy": "mlp"}, "none ships with this draft"),
        ({"policy": "ewma"}, "none ships with this draft"),
    ):
        use(**section)
        with pytest.raises(ValueError, match=message):
            check_blockpilot(arguments(draft))


def test_a_damaged_policy_is_refused_at_start(draft, use, tmp_path):
    document = PolicyDocument(policy="mlp", default=6, candidates=(4, 5, 6, 7, 8), weights="w.safetensors")
    path = write_policy(tmp_path, document, Predictor(16, 5, width=8))
    use(policy_file=str(path))
    check_blockpilot(arguments(draft))
    (tmp_path / "w.safetensors").write_bytes(b"\0" * 50)
    with pytest.raises(ValueError, match="cannot be used"):
        check_blockpilot(arguments(draft))


def test_a_policy_that_ships_with_the_draft_is_enough(draft, use):
    document = PolicyDocument(policy="mlp", default=6, candidates=(4, 5, 6, 7, 8), weights="w.safetensors")
    write_policy(draft, document, Predictor(16, 5, width=8))
    use(policy="mlp")
    check_blockpilot(arguments(draft))


@pytest.mark.parametrize("table", [{"scope": "group"}, {"path": "t.safetensors"}])
def test_the_tails_table_is_never_stored_nor_grouped(use, table):
    with pytest.raises(ValueError, match="table"):
        use(tail_graft=True, table=table)
        startup.current_config()


def test_a_policy_of_another_target_leaves_everyone_at_the_default(tmp_path, caplog, monkeypatch):
    from sgl_graft.blockpilot import setup
    from sgl_graft.blockpilot.ewma import AcceptHistory
    from sgl_graft.blockpilot.predictor import Head
    from sgl_graft.blockpilot.setup import fingerprint_of, make_policy
    from sgl_graft.blockpilot.shape import block_shape
    from sgl_graft.config import BlockPilotConfig

    monkeypatch.setattr(setup, "_all_reduce", lambda: lambda x: x)
    head = Head(torch.randn(64, 16), 64)
    fields = {"policy": "mlp", "default": 5, "candidates": (4, 5, 6), "weights": "w.safetensors"}
    path = write_policy(tmp_path, PolicyDocument(**fields, vocab_size=65), Predictor(16, 3, width=8))
    config = BlockPilotConfig(policy_file=path)
    shape = block_shape(config, 6, 8)
    policy = make_policy(config, shape, path, AcceptHistory(2, 8), None, head, fingerprint_of(head), "cpu")
    assert policy.default == 6 and not policy.reads_hidden
    assert "vocabulary of 65" in caplog.text


class Target(torch.nn.Module):
    def __init__(self, vocab_size=64, hidden=16):
        super().__init__()
        self.lm_head = torch.nn.Linear(hidden, vocab_size, bias=False)


def pilot_with(policy, path, fingerprint):
    from sgl_graft.blockpilot.setup import Pilot

    return Pilot(None, SimpleNamespace(policy=policy), path, None, fingerprint)


def worker_with(model):
    config = SimpleNamespace(vocab_size=64)
    return SimpleNamespace(model_runner=SimpleNamespace(model=model, model_config=config))


@pytest.mark.parametrize("released", [True, False])
def test_a_weight_update_refolds_a_released_predictor_and_disables_a_trained_one(
    tmp_path, monkeypatch, released
):
    from sgl_graft.blockpilot import setup
    from sgl_graft.blockpilot.mlp import MlpPolicy
    from sgl_graft.blockpilot.policy_file import read_policy, usable

    monkeypatch.setattr(setup, "_all_reduce", lambda: lambda x: x)
    model = Target()
    head = setup.target_head(model, 64)
    assert head is not None
    if released:
        predictor, path = Predictor(64, 5, width=16), tmp_path / "model.pt"
        torch.save(predictor.state_dict(), path)
    else:
        fields = {"policy": "mlp", "default": 6, "candidates": (4, 5, 6, 7, 8), "weights": "w.safetensors"}
        path = write_policy(tmp_path, PolicyDocument(**fields), Predictor(16, 5, width=16))
    document, predictor, reads_logits = read_policy(path)
    policy = MlpPolicy(document, usable(predictor, reads_logits, head, lambda x: x))
    pilot = pilot_with(policy, path, setup.fingerprint_of(head))
    before = policy.predictor
    pilot.refresh(worker_with(model))
    assert policy.predictor is before, "nothing changed"
    with torch.no_grad():
        model.lm_head.weight += 0.5
    pilot.refresh(worker_with(model))
    if not released:
        assert policy.predictor is None
        return
    hidden = torch.randn(30, 16)
    with torch.no_grad():
        wanted = predictor(model.lm_head(hidden)).argmax(1)
        assert torch.equal(policy.predictor(hidden).argmax(1), wanted)


def test_a_soft_capped_target_and_a_released_predictor_are_refused(tmp_path, monkeypatch):
    from sgl_graft.blockpilot import setup
    from sgl_graft.blockpilot.ewma import AcceptHistory
    from sgl_graft.blockpilot.predictor import Head
    from sgl_graft.blockpilot.shape import block_shape
    from sgl_graft.config import BlockPilotConfig

    monkeypatch.setattr(setup, "_all_reduce", lambda: lambda x: x)
    torch.save(Predictor(64, 5, width=16).state_dict(), tmp_path / "model.pt")
    config = BlockPilotConfig(policy_file=tmp_path / "model.pt")
    head = Head(torch.randn(64, 16), 64, soft_cap=30.0)
    with pytest.raises(ValueError, match="softcapping"):
        setup.make_policy(
            config,
            block_shape(config, 16, 18),
            config.policy_file,
            AcceptHistory(2, 18),
            None,
            head,
            "",
            "cpu",
        )


def test_a_cost_table_of_another_kind_of_device_leaves_everyone_at_the_default(tmp_path, caplog):
    import torch

    from sgl_graft.blockpilot.costs import CostTable, write_costs
    from sgl_graft.blockpilot.ewma import AcceptHistory
    from sgl_graft.blockpilot.policy_file import PolicyDocument, write_policy
    from sgl_graft.blockpilot.setup import make_policy, usable_costs
    from sgl_graft.blockpilot.shape import block_shape
    from sgl_graft.config import BlockPilotConfig

    path = write_policy(tmp_path, PolicyDocument(policy="ewma", default=8, candidates=(4, 8)))
    config, history = BlockPilotConfig(), AcceptHistory(4, 8)
    for device, name in (("cuda", "fixed"), ("cpu", "ewma"), ("", "ewma")):
        file = tmp_path / "costs.json"
        write_costs(file, CostTable(seconds={1: {1: 1.0, 8: 2.0}}, device=device))
        costs = usable_costs(config, file, "cpu")
        shape = block_shape(config, 8, None)
        policy = make_policy(config, shape, path, history, costs, None, "", torch.device("cpu"))
        assert policy.name == name, device
    assert "is of cuda, this server runs on cpu" in caplog.text


def test_costs_of_another_device_that_were_named_are_refused(tmp_path):
    from sgl_graft.blockpilot.costs import CostTable, write_costs
    from sgl_graft.blockpilot.setup import usable_costs
    from sgl_graft.config import BlockPilotConfig

    file = tmp_path / "costs.json"
    write_costs(file, CostTable(seconds={1: {1: 1.0}}, device="cuda"))
    with pytest.raises(ValueError, match="is of cuda, this server runs on cpu"):
        usable_costs(BlockPilotConfig(costs=file), file, "cpu")
