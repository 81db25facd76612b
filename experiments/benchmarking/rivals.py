"""Runs what people use, on PyTorch and scikit-learn, which need not be installed."""

import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.data.batches import Batch


def installed(package: str) -> bool:
    """Returns whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def sklearn_map(X: Float[ndarray, "N D"], Y: Float[ndarray, "N D"]) -> Float[ndarray, "D D"]:
    """Least squares of one pair by `LinearRegression(fit_intercept=False)`; W for `y =
    x @ W`.
    """
    from sklearn.linear_model import LinearRegression

    return LinearRegression(fit_intercept=False).fit(X, Y).coef_.T


def svd_linearity(X: Any, Y: Any) -> float:
    """Linearity of one pair of torch tensors [N, D] by the steps of the public code of
    Razzhigaev et al. 2024.

    Centre, divide by the Frobenius norm, solve by the SVD of X without any cut-off,
    apply the solution.
    """
    import torch

    X, Y = X - X.mean(0), Y - Y.mean(0)
    X, Y = X / X.norm(), Y / Y.norm()
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    A = (Vh.T / S) @ (U.T @ Y)
    return 1 - float((X @ A - Y).square().sum())


def torch_streams(
    folder: pathlib.Path, batches: Sequence[Batch], attention: str, dtype: str
) -> Callable[[], list[Float[ndarray, "N D"]]]:
    """h_0 .. h_L at the batches' positions by transformers, with output_hidden_states;
    `attention`: eager or sdpa.

    The last one is after the final norm, as transformers has it. The model has no head,
    so that no logits are computed.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {"attn_implementation": attention, "dtype": getattr(torch, dtype)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = (
        transformers.AutoModel.from_pretrained(folder, local_files_only=True, **options)
        .eval()
        .to(device)
    )
    count = sum(int((batch.examples >= 0).sum()) for batch in batches)

    def capture() -> list[ndarray]:
        values: list[ndarray] = []
        with torch.inference_mode():
            for batch in batches:
                tokens = torch.from_numpy(batch.tokens).long().to(device)
                real = torch.from_numpy(batch.segments > 0).to(device)
                out = model(tokens, attention_mask=real, output_hidden_states=True, use_cache=False)
                rows, columns = np.nonzero(batch.examples >= 0)
                places = batch.read_at[rows, columns]
                examples = batch.examples[rows, columns]
                for k, stream in enumerate(out.hidden_states):
                    if k == len(values):
                        values.append(np.empty((count, stream.shape[-1]), np.float32))
                    values[k][examples] = stream[rows, places].float().cpu().numpy()
        return values

    return capture


def torch_matmul_chain(shapes: Sequence[tuple[int, int, int]], dtype: str) -> Callable[[], Any]:
    """Products [N, K] @ [K, M] one after another."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = lambda *shape: torch.randn(*shape, dtype=getattr(torch, dtype), device=device)  # noqa: E731
    factors = [(draw(N, K), draw(K, M)) for N, K, M in shapes]

    def work() -> Any:
        products = [a @ b for a, b in factors]
        return [float(product[0, 0]) for product in products]  # waits for all of them

    work()
    return work
