"""Online adaptation of a server's draft, put together from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...config import AdaptationConfig
from ...serving.request_settings import settings_of
from ..model import SpecBlockDraft
from . import store
from .adaptation import Adaptation, Ranks
from .bandit import BanditSettings, CostAwareBandit
from .director import Director
from .learner import LearnSettings
from .process import LearnerProcess
from .weights import WeightArea, digest_of


def labels_of(request: Any) -> tuple[str | None, bool]:
    """A request's domain, and whether it may be learned from."""
    settings = settings_of(request.sampling_params.custom_params)
    return settings.group, settings.learn and settings.enabled


def make_adaptation(
    draft: SpecBlockDraft,
    draft_to_target: Tensor,
    config: AdaptationConfig,
    ranks: Ranks,
    weights_changed: Callable[[], None],
) -> Adaptation:
    """Every rank makes one; rank 0's has the learner, and the state that an earlier server saved.

    Raises:
        ValueError: `state_dir` cannot be written, or holds the weights of another draft.
    """
    served = WeightArea.private(draft)
    director = make_director(draft, draft_to_target, config, served) if ranks.decides else None
    return Adaptation(
        draft, served, ranks, director, config.every, labels_of, config.domains, weights_changed
    )


def make_director(
    draft: SpecBlockDraft, draft_to_target: Tensor, config: AdaptationConfig, served: WeightArea
) -> Director:
    """Rank 0's; `served` holds the checkpoint's weights, afterwards the saved ones where there are any."""
    learning = LearnSettings(full_rate=config.learning_rate, head_rate=config.learning_rate)
    base = digest_of(served.flat)
    saved, keep = None, None
    if config.state_dir is not None:
        store.check_writable(config.state_dir)
        saved = store.load(config.state_dir, base, served.flat.numel())
        keep = {"folder": str(config.state_dir), "base": base}
    director = Director(
        start_learner=lambda: LearnerProcess(
            draft, draft_to_target, served, learning, config.share, config.nice
        ),
        served=served,
        shipped=served.flat.clone(),
        bandit=CostAwareBandit(
            BanditSettings(
                min_tokens=config.min_tokens,
                wait_tokens=config.update_rows,
                explore=config.explore,
                contention=config.contention,
                arms=config.arms,
                always=config.always,
            )
        ),
        capacity=config.buffer_rows,
        update_rows=config.update_rows,
        save=keep,
    )
    if saved is not None:
        try:
            director.restore(saved.flat, saved.version, saved.bandit)
        except (KeyError, TypeError, ValueError) as error:
            assert config.state_dir is not None
            store.set_aside(config.state_dir, f"its estimates make no sense: {error!r}")
    return director
