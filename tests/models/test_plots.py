import numpy as np
import pytest
from PIL import Image

from gleaner.models.plots import (
    before_after_plot,
    compare_plot,
    contrast_plot,
    gap_plot,
    learning_plot,
    ledger_plot,
)


def entries(count, method="grpo"):
    generator = np.random.default_rng(0)
    lines = []
    for step in range(count):
        gain = step / max(1, count)
        metrics = {
            "success/mean": 0.15 + 0.5 * gain + generator.normal(0, 0.03),
            "groups/all_fail": 0.55 - 0.4 * gain + generator.normal(0, 0.04),
            "signal/recovered": 0.0 if method == "grpo" else 0.7,
        }
        if step % max(1, count // 6) == 0:
            value = 0.12 + 0.5 * gain
            metrics |= {
                "validation/success": value,
                "validation/low": value - 0.05,
                "validation/high": value + 0.06,
            }
        ledger = [
            {
                "kind": "mixed",
                "source": "reward",
                "rows": 80,
                "tokens": int(4000 + 2000 * gain),
                "weight": 30.0,
            }
        ]
        if method != "grpo":
            tokens = int(3000 * (1 - gain))
            ledger.append(
                {
                    "kind": "all_fail",
                    "source": "teacher",
                    "rows": 40,
                    "tokens": tokens,
                    "weight": 20 * (1 - gain),
                }
            )
            ledger.append(
                {"kind": "mixed", "source": "teacher", "rows": 40, "tokens": tokens // 3, "weight": 5.0}
            )
        lines.append({"metrics": metrics, "budget": {"rollouts": 128.0 * (step + 1)}, "ledger": ledger})
    return lines


def colours(path):
    """Width, height and the number of different colours of a PNG."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.width, image.height, len(set(image.convert("RGB").get_flattened_data()))


@pytest.mark.parametrize("count", [1, 2, 40, 700])
def test_a_run_of_any_length_has_its_plots(tmp_path, count):
    learning_plot(entries(count), tmp_path / "learning.png", title="household")
    ledger_plot(entries(count, "gats"), tmp_path / "deeper" / "ledger.png", title="household")
    for path in (tmp_path / "learning.png", tmp_path / "deeper" / "ledger.png"):
        width, height, shades = colours(path)
        assert (width, height) == (1300, 520)
        assert shades > 50


def test_steps_without_validation_or_gradient_are_drawn(tmp_path):
    bare = [{"metrics": {"success/mean": 0.0}, "budget": {}, "ledger": []} for _ in range(3)]
    learning_plot(bare, tmp_path / "learning.png")
    ledger_plot(bare, tmp_path / "ledger.png")
    assert colours(tmp_path / "ledger.png")[2] > 10


def test_bars_before_and_after(tmp_path):
    bars = {
        "household": ((0.12, 0.10, 0.15), (0.55, 0.51, 0.59)),
        "chain_sum": ((0.3, 0.27, 0.33), (0.98, 0.96, 0.99)),
    }
    before_after_plot(bars, tmp_path / "bars.png")
    assert colours(tmp_path / "bars.png")[2] > 20


def test_arms_are_compared_up_to_the_budget_that_all_their_seeds_reached(tmp_path):
    grid = np.arange(0, 2_001, 250.0)
    generator = np.random.default_rng(1)
    arms = {
        arm: [
            (grid[: 9 - seed], (0.1 + speed * grid / 2_000 + generator.normal(0, 0.03, 9))[: 9 - seed])
            for seed in range(3)
        ]
        for arm, speed in (("grpo", 0.4), ("dapo", 0.5), ("larger groups", 0.3))
    }
    compare_plot(arms, tmp_path / "compare.png", title="compare")
    assert colours(tmp_path / "compare.png")[2] > 50
    compare_plot({"grpo": [([], [])]}, tmp_path / "nothing.png")
    compare_plot({"grpo": [([0.0], [0.2])]}, tmp_path / "one.png")
    assert colours(tmp_path / "one.png")[0] == 1170


def test_the_legend_of_many_arms_is_whole(tmp_path):
    """Its longest name once stood outside of the figure."""
    arms = {
        f"an_arm_of_a_long_name_{i}": [([0.0, 10.0], [0.1, i / 20]), ([0.0, 10.0], [0.1, 0.5])]
        for i in range(12)
    }
    compare_plot(arms, tmp_path / "many.png", title="many")
    with Image.open(tmp_path / "many.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert (pixels[:, :4] == 255).all()  # nothing runs over the edges
    assert (pixels[:, -4:] == 255).all()


def test_contrasts_and_gaps_are_drawn_with_their_intervals(tmp_path):
    bars = [(0.1, 0.02, 0.18), (0.05, -0.01, 0.11)]
    contrast_plot({"gats - grpo": bars, "always - grpo": bars}, tmp_path / "contrasts.png", title="t")
    assert colours(tmp_path / "contrasts.png")[2] > 20
    gap_plot({"strong": (0.4, bars[0]), "weak": (-0.1, (-0.2, -0.3, -0.1))}, tmp_path / "gap.png")
    assert colours(tmp_path / "gap.png")[2] > 20
