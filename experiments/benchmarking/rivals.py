"""Runs what people use, on PyTorch and scikit-learn, which need not be installed."""

import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.data.batches import Batch
from jmat.runtime.annotations import Keywords


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
    options: Keywords = {"attn_implementation": attention, "dtype": getattr(torch, dtype)}
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


def torch_generate(
    folder: pathlib.Path, prompts: Int[ndarray, "B T"], new: int, dtype: str
) -> Callable[[], Int[ndarray, "B N"]]:
    """Greedy text by transformers' `generate` with its cache, which no token ends."""
    import torch

    model = torch_causal_model(folder, dtype)
    model.generation_config.eos_token_id = None
    tokens = torch.from_numpy(prompts).long().to(model.device)

    def write() -> ndarray:
        with torch.inference_mode():
            found = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        return found[:, tokens.shape[1] :].cpu().numpy()

    return write


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


def torch_causal_model(folder: pathlib.Path, dtype: str) -> Any:
    """A causal language model of transformers, on the GPU where there is one."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=getattr(torch, dtype)
        )
        .eval()
        .to(device)
    )


def torch_jacobians(model: Any, tokens: Any, skip_first: int = 16, axes: int | None = None) -> Any:
    """Mean Jacobians of h_L by h_0 .. h_{L−1} for one prompt, [L, D, D]: a backward
    pass for each coordinate, or for the first `axes` alone.

    `model` is a causal one of transformers, `tokens` its ids [1, T]. Blocks run inside
    the model: called by itself, a block of transformers 5 without a mask is not causal.
    """
    import torch

    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    streams: list[Any] = []

    def enter(block: Any, given: Any, named: Any) -> Any:
        streams.append(given[0].detach().requires_grad_())
        return (streams[0], *given[1:]), named

    def leave(block: Any, given: Any, out: Any) -> None:
        streams.append(out[0] if isinstance(out, tuple) else out)

    hooks = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    model.requires_grad_(False)(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    *sources, final = streams
    counted = slice(skip_first, tokens.shape[1] - 1)
    summed = final[0, counted].sum(0)
    count = axes or len(summed)
    J = torch.empty(len(sources), count, len(summed))
    for i in range(count):
        for l, gradient in enumerate(torch.autograd.grad(summed[i], sources, retain_graph=True)):
            J[l, i] = gradient[0, counted].mean(0)
    return J
