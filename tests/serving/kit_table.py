"""How each of SGLang's own server test kits runs against the CPU servers; `docs/test-kits.md` is made of it.

python -m tests.serving.kit_table > docs/test-kits.md
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

GSM8K = "downloads the GSM8K data set; `sgl-graft bench` measures accept length on local prompts"
SEEDED = "some samples of SmolLM2 leave a field out or never end one"
TINY = "tiny"
EMBEDDED = "smollm2"
WIDE = "tiny, wide"


@dataclass(frozen=True)
class KitRun:
    """One kit class of ``sglang.test.kits`` on one target.

    Attributes:
        kit: ``module.Class`` below ``sglang.test.kits``.
        target: the tiny target, the same with a large vocabulary and context, which gets its own server and
            runs under ``make soak``, or the embedded model where answers must make sense.
        settings: attributes set in the subclass, each with its reason.
        soak: tests that run under ``make soak`` only, each with its reason.
        excluded: tests that do not run, each with its reason.
        flags: server flags of its own; such a kit gets its own server and runs under ``make soak``.
        environment: environment variables of its own server.
        seed: ``sampling_seed`` that its requests get; None: they stay as they are.
    """

    kit: str
    target: str = TINY
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    soak: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    seed: int | None = None

    @property
    def name(self) -> str:
        return self.kit.rsplit(".", 1)[1]

    @property
    def own_server(self) -> bool:
        return bool(self.flags or self.environment or self.target == WIDE)

    def load(self) -> type:
        module, name = self.kit.rsplit(".", 1)
        kit: type = getattr(importlib.import_module(f"sglang.test.kits.{module}"), name)
        return kit

    def tests(self) -> Iterator[tuple[str, str]]:
        """Every test of the kit, with how it runs."""
        reset = "; ".join(f"`{name} = {value!r}`: {why}" for name, (value, why) in self.settings.items())
        for test in sorted(name for name in vars(self.load()) if name.startswith("test_")):
            if test in self.excluded:
                yield test, f"excluded: {self.excluded[test]}"
                continue
            how = f"attributes set ({reset})" if reset else "as it is"
            if self.seed is not None:
                how += f", its requests with the seed {self.seed} ({SEEDED})"
            if test in self.soak:
                how += f"; `make soak`: {self.soak[test]}"
            elif self.own_server:
                how += "; `make soak`, on a server of its own"
            yield test, how


class OfVariant(str):
    """A setting that each variant states for itself: the attribute of that name."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{self} of the variant"


ACCEPT_LENGTH = OfVariant("accept_length")

KITS = (
    KitRun(
        "spec_server_kits.SpecCorrectnessKit",
        settings={
            "acc_length_thres": (
                ACCEPT_LENGTH,
                "1.5, 1.3 for DFLASH: the tiny draft knows bigrams only; 3.1 is an 8B model's",
            ),
            "batch_accept_len_thres": (ACCEPT_LENGTH, "as above"),
        },
    ),
    KitRun(
        "spec_server_kits.SpecLogprobKit",
        settings={"logprob_match_delta": (1e-3, "tightened: 0.5 is the rounding of bf16, we run fp32")},
        soak={"test_logprob_mixed": "64 prompts of up to 2000 tokens"},
    ),
    KitRun("spec_server_kits.SpecPenaltyKit"),
    KitRun(
        "spec_server_kits.SpecFeatureKit",
        target=EMBEDDED,
        soak={
            "test_request_abort": "20 answers of 1024 tokens",
        },
        excluded={
            "test_radix_attention": "400 prompts and 50,000 tokens would take two cores an hour; below",
            "test_constrained_decoding": "sets no length limit, and SmolLM2 never closes its object; "
            "`SpecGrammarKit` and `JSONConstrainedMixin` run",
        },
    ),
    KitRun(
        "spec_server_kits.SpecFeatureKit",
        target=WIDE,
        excluded={
            "test_constrained_decoding": "as above",
            "test_request_abort": "smollm2 above",
        },
    ),
    KitRun("spec_server_kits.SpecGrammarKit", target=EMBEDDED),
    KitRun("spec_server_kits.SpecHiddenStatesKit", flags=("--enable-return-hidden-states",)),
    KitRun(
        "spec_server_kits.SpecParityKit",
        excluded={
            "test_parity_vs_reference": "starts its reference server itself, with flags for a GPU; "
            "`test_losslessness.py` compares more"
        },
    ),
    KitRun("spec_server_kits.SpecAccuracyKit", excluded={"test_gsm8k": GSM8K}),
    KitRun("spec_server_kits.SpecPerfKit", excluded={"test_max_token_one": GSM8K}),
    KitRun(
        "spec_server_kits.SpecSamplingMaskKit",
        excluded={
            "test_sampling_mask": "the CPU's sampler keeps no list of candidates; such a request is refused: "
            "`test_request_kinds.py::test_a_sampling_mask_is_refused`"
        },
    ),
    KitRun("basic_api_contract_kit.BasicAPIContractMixin"),
    KitRun(
        "basic_decode_correctness_kit.BasicDecodeCorrectnessMixin",
        target=EMBEDDED,
        excluded={
            "test_basic_math": "17 times 23 is too hard for a model of 135M parameters",
            "test_color_completion": "SmolLM2 does not name yellow",
        },
    ),
    KitRun(
        "matched_stop_kit.MatchedStopMixin",
        target=EMBEDDED,
        excluded={
            "test_finish_stop_str": "SmolLM2's answer never reaches the stop; plain decoding fails it, too"
        },
    ),
    KitRun(
        "json_constrained_kit.JSONConstrainedMixin",
        target=EMBEDDED,
        excluded={
            "test_json_generate": "SmolLM2 writes digits without end, so 128 tokens close no object; plain "
            "decoding does the same",
            "test_mix_json_and_other": "half of it is that same greedy request; `test_mixed_load.py` mixes "
            "grammars with free requests",
        },
    ),
    KitRun("regex_constrained_kit.RegexConstrainedMixin", target=EMBEDDED, seed=1),
    KitRun("ebnf_constrained_kit.EBNFConstrainedMixin", target=EMBEDDED, seed=1),
    KitRun(
        "abort_timeout_kit.AbortAllMixin",
        settings={
            "abort_all_max_new_tokens": (2000, "16000 does not fit the tiny target's context"),
            "abort_all_sleep": (0.5, "the tiny target could finish in the 2 s meant for an 8B model"),
        },
    ),
    KitRun(
        "abort_timeout_kit.WaitingTimeoutMixin",
        flags=("--max-running-requests", "1"),
        environment={"SGLANG_REQ_WAITING_TIMEOUT": "0.5"},
    ),
    KitRun(
        "abort_timeout_kit.RunningTimeoutTwoWaveMixin",
        environment={"SGLANG_REQ_RUNNING_TIMEOUT": "2"},
    ),
    KitRun(
        "basic_scheduler_stress_kit.BasicSchedulerStressMixin",
        target=EMBEDDED,
        soak={"test_long_prompt": "a prompt of 8K tokens"},
        excluded={"test_concurrent_requests": "SmolLM2 ends these answers at once; plain decoding, too"},
    ),
)

FUNCTIONS = (
    (
        "radix_cache_server_kit.run_radix_attention_test",
        "runs inside `SpecFeatureKit.test_radix_attention`",
    ),
    (
        "cache_hit_kit.run_multiturn_cache_hit_test",
        "tiny target, `test_kits.py::test_multi_turn_cache_hits`; `dataset_path` set: the default downloads "
        "ShareGPT; 4 clients, 128 tokens a turn: lengths meant for a GPU; `miss_tolerance` 2: SGLang keys "
        "the cache of an EAGLE server by pairs of tokens, one fewer than tokens",
    ),
)


def markdown() -> str:
    lines = [
        "# SGLang's server test kits against the CPU servers",
        "",
        "SGLang ships these kits in its wheel (`sglang.test.kits`). `tests/serving/test_kits.py` imports",
        "them and runs them against every speculative variant of `tests/serving/variants.py`. This page is",
        "made by `python -m tests.serving.kit_table > docs/test-kits.md`, and a test compares the two.",
        "",
        "Targets: *tiny* is the byte-level model of `tests/serving/markov.py`; *tiny, wide* the same with",
        "the vocabulary and context that a kit presumes, on its own server; *smollm2* the embedded model,",
        "whose kits `make test` runs against the EAGLE tree and `make soak` against the other variants too.",
        "",
        "| kit | test | target | how it runs |",
        "|---|---|---|---|",
    ]
    for run in KITS:
        lines += [f"| `{run.name}` | `{test}` | {run.target} | {how} |" for test, how in run.tests()]
    lines += [f"| `{kit.split('.')[0]}` | `{kit.split('.')[1]}` | | {how} |" for kit, how in FUNCTIONS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
