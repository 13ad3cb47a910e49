from pathlib import Path

import pytest

from sgl_graft.bench.plan import Sampling, order_cells, parse_numbers, parse_variants, reference_variant


def test_variants_carry_their_settings(draft: Path) -> None:
    none, eagle, chain = parse_variants(
        "none,EAGLE3,chain=EAGLE3",
        drafts=[f"EAGLE3={draft}"],
        settings=["EAGLE3.slots=8", "EAGLE3.steps=4", "chain.topk=1"],
        server_args=["chain=--page-size=16"],
        urls=["none=http://localhost:1"],
    )
    assert (none.algorithm, none.url, none.speculates) == ("none", "http://localhost:1", False)
    assert (eagle.tree.slots, eagle.tree.steps, eagle.tree.topk, eagle.draft) == (8, 4, None, draft)
    assert (chain.algorithm, chain.tree.topk, chain.server_args) == ("EAGLE3", 1, ("--page-size=16",))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("none,EAGEL3", {}, "unknown algorithm 'EAGEL3'"),
        ("none,none", {}, "'none' appears twice"),
        (" , ", {}, "--variants is empty"),
        ("none", {"settings": ["EAGLE3.topk=4"]}, "no variant named 'EAGLE3'"),
        ("EAGLE3", {"settings": ["EAGLE3.width=4"]}, "unknown key 'width'"),
        ("EAGLE3", {"settings": ["EAGLE3.topk=0"]}, "positive whole number"),
        ("EAGLE3", {"settings": ["topk=4"]}, "write VARIANT.KEY=VALUE"),
        ("EAGLE3", {"settings": ["EAGLE3.config=/no/such"]}, "no such file"),
        ("EAGLE3", {"drafts": ["EAGLE3=/no/such"]}, "no checkpoint at /no/such"),
        ("EAGLE3", {"drafts": ["/no/such"]}, "write VARIANT=VALUE"),
        ("EAGLE3", {"urls": ["GRAFT=http://x"]}, "no variant named 'GRAFT'"),
    ],
)
def test_mistakes_are_named(spec: str, options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variants(spec, **options)


def test_numbers() -> None:
    assert parse_numbers("--concurrency", "1,8,1", int, 1) == (1, 8)
    assert parse_numbers("--temperature", "0,0.7", float, 0) == (0.0, 0.7)
    for text in ("", "0", "a", "1;2"):
        with pytest.raises(ValueError, match="--concurrency"):
            parse_numbers("--concurrency", text, int, 1)


def test_reference_is_none_or_the_first_plain_variant() -> None:
    assert reference_variant(parse_variants("stock=none,none,EAGLE3")) == "none"
    assert reference_variant(parse_variants("EAGLE3,stock=none")) == "stock"
    assert reference_variant(parse_variants("EAGLE3")) is None


def test_variants_alternate_and_turn_round() -> None:
    cells = order_cells(["a", "b"], ["x", "y"], [0.0], [1], 2, together=True)
    assert [c.variant for c in cells] == list("abab" + "baba")
    assert [c.repeat for c in cells] == [0] * 4 + [1] * 4
    apart = order_cells(["a", "b"], ["x", "y"], [0.0], [1], 2, together=False)
    assert [c.variant for c in apart] == list("aabb" + "bbaa")
    assert sorted(cells) == sorted(apart)


def test_greedy_requests_carry_no_sampling() -> None:
    sampling = Sampling(8, top_p=0.9, top_k=20, min_p=0.1)
    assert sampling.params(0.0, 7) == {"max_new_tokens": 8, "temperature": 0.0}
    assert sampling.params(0.7, 7) == {
        "max_new_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "sampling_seed": 7,
    }
