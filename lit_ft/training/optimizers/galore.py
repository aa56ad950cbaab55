"""GaLore: AdamW with moments of a low-rank projection of the gradient; needs the extra ``optimizers``."""

from collections.abc import Iterable
from typing import Any

from pytorch_optimizer import GaLore
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector
from torch.optim.optimizer import StateDict

from lit_ft.errors import RecipeError
from lit_ft.training.optimizers.configure import MATRICES


class GaLoreAdamW(GaLore):
    """``pytorch_optimizer.GaLore`` on the matrices of hidden layers, plain AdamW on all other weights.

    Zhao et al. 2024, arXiv:2403.03507. This class adds the choice of weights that are projected, and a ``state_dict``
    of tensors and numbers instead of Python objects, so that checkpoints load with ``weights_only``.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-6,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
    ) -> None:
        """Set the hyperparameters of AdamW and of the projection.

        Args:
            params: parameter groups, each with the key ``MATRICES``, as ``configure_optimizers`` creates them.
            lr: learning rate.
            betas: decay rates of the first and second moment.
            weight_decay: coefficient of decoupled weight decay.
            eps: number added to the square root of the second moment.
            rank: rank of the projected gradient; the moments of an m x n matrix, m >= n, are m x rank.
            update_proj_gap: number of optimizer steps between two updates of the projection, each a singular value
                decomposition.
            scale: factor on the updates of projected weights.

        Raises:
            RecipeError: no weight matrix of a hidden layer is trainable.
        """
        projected = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "projection_type": "std"}
        groups = [{**group, **projected} if group[MATRICES] else group for group in params]
        if not any(group[MATRICES] for group in groups):
            raise RecipeError("GaLoreAdamW: no weight matrix of a hidden layer is trained; take torch.optim.AdamW")
        super().__init__(groups, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)

    def state_dict(self) -> StateDict:
        """State dict with moments and projections as tensors."""
        saved = super().state_dict()
        saved["state"] = {
            index: {k: _plain(v) if isinstance(v, GaLoreProjector) else v for k, v in state.items()}
            for index, state in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load moments and projections from tensors."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "projector" in state:
                    options = {name: group[name] for name in ("rank", "update_proj_gap", "scale", "projection_type")}
                    projector = GaLoreProjector(**options)
                    vars(projector).update(state["projector"])
                    state["projector"] = projector


def _plain(projector: GaLoreProjector) -> dict[str, object]:
    return {"ortho_matrix": projector.ortho_matrix, "last_svd_step": projector.last_svd_step}
