"""The numbers of a training run, and the learning rate over its time."""

Phase = tuple[int, int, float]  # rows, length, until this share of the time

SEED = 20
PEAK_LR = 3e-3
WARMUP_STEPS = 100
DECAY_FROM = 0.35  # share of the time after which the learning rate falls linearly to FINAL_LR of its peak
FINAL_LR = 0.01
PHASES: tuple[Phase, ...] = ((32, 1024, 0.75), (16, 2048, 1.0))

MTP_WEIGHT = 0.2
MTP_ROWS = 4  # the MTP head sees every fourth row of a batch
BALANCE_WEIGHT = 2e-3


def learning_rate(step: int, share: float) -> float:
    """Warm-up by steps, then constant, then linear decay by the share of the time used."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    left = min(1.0, max(0.0, (1.0 - share) / (1.0 - DECAY_FROM)))
    return PEAK_LR * warm * (FINAL_LR + (1.0 - FINAL_LR) * left)


def check_phases(phases: list[Phase]) -> list[Phase]:
    """`phases` as they are, if they can be trained.

    Raises:
        ValueError: sizes below 1, shares that do not grow, or a last one that does not reach the end.
    """
    untils = [until for _, _, until in phases]
    if not phases or untils[-1] != 1.0 or untils != sorted(untils) or min(n for p in phases for n in p[:2]) < 1:
        raise ValueError(f"phases are [rows, length, until this share of the time], the last until 1.0, not {phases}")
    return phases
