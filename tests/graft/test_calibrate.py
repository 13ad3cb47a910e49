"""Where calibration prompts come from."""

import pytest

from sgl_graft.graft.calibrate import shipped_prompts


def test_shipped_prompts_mix_the_sources_and_end_before_the_answer():
    prompts = shipped_prompts("smollm2-135m-instruct", 40)
    assert len(prompts) == 40
    assert len({prompt.input_ids for prompt in prompts}) > 20
    assert all(len(prompt.input_ids) > 5 for prompt in prompts)


def test_a_target_without_dialogues_needs_a_file():
    with pytest.raises(ValueError, match="--prompts"):
        shipped_prompts("unknown", 10)
