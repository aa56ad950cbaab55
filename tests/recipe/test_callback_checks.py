"""Monitors and file names of callbacks."""

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_ft import RecipeError
from lit_ft.recipe.callback_checks import check_callbacks, first_validation, run_length


@pytest.mark.parametrize("monitor", ["val/loss", "train/grad_norm", "val/loss/tools", "throughput/tokens_per_second"])
def test_what_is_logged_is_monitored(monitor: str) -> None:
    check_callbacks([EarlyStopping(monitor), ModelCheckpoint(monitor=monitor, filename="{step}")], has_validation=True)


@pytest.mark.parametrize(
    ("monitor", "has_validation", "message"),
    [
        ("eval_loss", True, "did you mean 'val/loss'"),
        ("loss", True, "is not logged"),
        ("val/accuracy", True, "did you mean 'val/token_accuracy'"),
        ("val/loss/tools", False, "there is no validation"),
        (
            "val_loss",
            False,
            "There are train/loss, .*train/regularization, train/expert_load_max_over_mean, train/padding_share$",
        ),
    ],
)
def test_what_is_not_logged_is_refused(monitor: str, has_validation: bool, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_callbacks([ModelCheckpoint(monitor=monitor)], has_validation)


def test_file_names() -> None:
    with pytest.raises(RecipeError, match="'loss={val/loss}' with auto_insert_metric_name: false"):
        check_callbacks([ModelCheckpoint(filename="{val/loss}")], has_validation=True)
    check_callbacks([ModelCheckpoint(filename="loss={val/loss}", auto_insert_metric_name=False)], has_validation=True)
    check_callbacks([ModelCheckpoint(filename="{epoch}-{step}"), ModelCheckpoint()], has_validation=False)


@pytest.mark.parametrize(
    ("interval", "every_n_epochs", "first"),
    [
        (1.0, 1, 10),
        (0.25, 1, 2),
        (0.01, 1, 1),
        (4, 1, 4),
        (1.0, 3, 30),
        (4, 3, 24),
        (25, None, 25),  # counted over epochs
    ],
)
def test_first_validation_of_epochs_of_ten_micro_batches(
    interval: float, every_n_epochs: int | None, first: int
) -> None:
    assert first_validation(interval, every_n_epochs, 10) == first


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "length"),
    [(1, -1, 4), (2, -1, 8), (3, -1, 10), (4, -1, 14), (-1, 2, 20), (4, 1, 10), (-1, -1, None)],
)
def test_run_length_in_epochs_of_ten_micro_batches_four_a_step(
    max_steps: int, max_epochs: int, length: int | None
) -> None:
    assert run_length(max_steps, max_epochs, batches=10, accumulate=4) == length
