"""Head and trunk trained together: the trunk in PyTorch, the head in jax.

A step reads windows of text with the model's own trunk, hands what the head reads to
jax (DLPack), takes the loss and its gradients there, and gives those by the states and
by the table back to PyTorch's backward pass:

    states, table (PyTorch) -> loss, d loss / d (states, table, head) (jax)
    -> backward from the states, and from the table, which may be the embedding, too

So tied tables stay tied, and any family of `transformers` will do. The trunk has a
learning rate of its own; both follow the same warm-up and decay. Dropout is off.

Axes: W windows of S tokens, P tokens in front of them, B windows of a step.
"""

import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.analysis.capture import Tokens
from softbottle.analysis.sources import states, trunk
from softbottle.analysis.sources.pretrained import Pretrained
from softbottle.experiments.retrofit import data, trial
from softbottle.experiments.retrofit.arms import Start
from softbottle.experiments.retrofit.data import Problem, Rows
from softbottle.experiments.retrofit.run import Result
from softbottle.experiments.retrofit.scores import Heldout, outcome
from softbottle.experiments.retrofit.trial import Training
from softbottle.ops import Options
from softbottle.training.metrics import NonFiniteLossError

_CHECK = 20  # steps between two looks at the loss and the clock


class Gradients(NamedTuple):
    """Of a mean loss, in the model's own units and order of words."""

    loss: jax.Array
    params: Any
    table_VD: jax.Array
    bias_V: jax.Array
    hidden_TD: jax.Array


class Tuner:
    """Trains a model with another head on its own text.

    Args:
        pretrained: the model; it is given back as it was.
        encoded: its text.
        problem: its states along that text, and its head.
        rate: the trunk's learning rate.

    Raises:
        ValueError: if the model's logits have a factor that is not in its table.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        encoded: trunk.Texts,
        problem: Problem,
        rate: float,
    ) -> None:
        weight = trunk.to_numpy(pretrained.head.weight)
        if not np.array_equal(weight, encoded.model.table_VD):
            raise ValueError(
                f"{pretrained.name} multiplies its logits by a constant, which "
                "--unfreeze cannot train."
            )
        self._pretrained, self._problem, self._rate = pretrained, problem, rate
        self._front = np.asarray(encoded.front.ids, np.int32)
        self._parts = states.split(encoded.texts, encoded.front)
        self._place_V = np.argsort(problem.order_V)
        torch = pretrained.torch
        both = torch.cuda.is_available() and jax.default_backend() == "gpu"
        self._where = "cuda" if both else "cpu"
        self._first = {
            name: tensor.detach().clone()
            for name, tensor in pretrained.module.state_dict().items()
        }

    def fit(
        self, begun: Start, training: Training, seed: int, deadline: float = math.inf
    ) -> Result | None:
        """Train head and trunk from the model as it was; see `trial.fit`.

        Raises:
            NonFiniteLossError: if the loss is lost.
        """
        torch, module = self._pretrained.torch, self._pretrained.module
        module.load_state_dict(self._first)
        module.to(self._where)
        try:
            return self._fit(torch, module, begun, training, seed, deadline)
        finally:
            module.to("cpu")
            module.load_state_dict(self._first)
            module.zero_grad(set_to_none=True)

    def _fit(self, torch, module, begun, training, seed, deadline):
        adam = torch.optim.Adam(module.parameters(), lr=self._rate)
        schedule = trial.schedule(training)
        tx = trial.optimizer(training)
        params, marks, losses = begun.params, [], []
        opt_state = tx.init(params)
        for number, windows in enumerate(self._batches(training, seed), 1):
            adam.zero_grad(set_to_none=True)
            now = begun._replace(params=params)
            found = self.backward(now, *windows, training.options)
            params, opt_state = _update(
                params, opt_state, found.params, training.rate, training=training
            )
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            for group in adam.param_groups:
                group["lr"] = self._rate * float(schedule(number - 1))
            adam.step()
            losses.append(found.loss)
            if number % _CHECK and number not in (1, training.steps):
                continue
            if not math.isfinite(float(found.loss)):
                raise NonFiniteLossError(
                    f"the loss of step {number} is {float(found.loss)}."
                )
            marks.append((number, time.monotonic()))
            if marks[-1][1] > deadline and number < training.steps:
                return None
        made = self._made(begun._replace(params=params))
        step_ms = trial.step_time(marks)
        told = {
            "step_ms": step_ms,
            "seconds": None if step_ms is None else training.steps * step_ms / 1e3,
            "train_loss": float(jnp.mean(jnp.stack(losses[-_CHECK:]))),
        }
        scores = outcome(self._problem, made, training, self._heldout())
        return Result(made, told | scores)

    def backward(
        self,
        begun: Start,
        ids_BS: np.ndarray,
        labels_BS: np.ndarray,
        options: Options,
    ) -> Gradients:
        """Add the gradients of a batch's mean loss to those of the trunk.

        Args:
            begun: the head; its table and bias are not read: the model's own are.
            ids_BS: windows, without the tokens in front.
            labels_BS: the tokens that follow, the model's own.
            options: of the head's operation.

        Returns:
            What jax computed.
        """
        head = self._pretrained.head
        hidden_TD = self._hidden(ids_BS)
        bias = getattr(head, "bias", None)
        problem = self._problem
        bias_V = jnp.zeros(len(problem.bias_V)) if bias is None else trunk.to_jax(bias)
        found = _gradients(
            begun.params,
            trunk.to_jax(head.weight),
            bias_V,
            trunk.to_jax(hidden_TD),
            self._place_V[labels_BS.reshape(-1)],
            problem.order_V,
            problem.train.scale,
            head=begun.head,
            options=options,
        )
        # jax reads PyTorch's memory, which the optimizer is about to change.
        jax.block_until_ready(found)
        pairs = [(hidden_TD, found.hidden_TD), (head.weight, found.table_VD)]
        if bias is not None:
            pairs.append((bias, found.bias_V))
        tensors, arrays = zip(*pairs, strict=True)
        cotangents = [trunk.to_torch(self._pretrained, array) for array in arrays]
        self._pretrained.torch.autograd.backward(list(tensors), cotangents)
        return found

    def _hidden(self, ids_BS):
        """What the head reads of some windows, a tensor [T, D] with its graph."""
        before = np.tile(self._front, (len(ids_BS), 1))
        read = trunk.hidden(self._pretrained, np.concatenate([before, ids_BS], axis=1))
        kept_BSD = read[:, len(self._front) :]
        return kept_BSD.reshape(-1, kept_BSD.shape[-1]).float()

    def _batches(self, training, seed):
        """Windows and labels of every step, pass after pass."""
        windows_WS, labels_WS = self._parts["train"]
        size = max(1, min(training.batch // windows_WS.shape[1], len(windows_WS)))
        done = number = 0
        while True:
            order = np.random.default_rng((seed, number)).permutation(len(windows_WS))
            for at in range(0, len(order) - size + 1, size):
                if done == training.steps:
                    return
                chosen = order[at : at + size]
                yield windows_WS[chosen], labels_WS[chosen]
                done += 1
            number += 1

    def _made(self, begun):
        """The head with the trained table and bias, for scaled states."""
        head, order_V = self._pretrained.head, self._problem.order_V
        table_VD = trunk.to_numpy(head.weight)[order_V]
        bias_V = self._problem.bias_V
        if getattr(head, "bias", None) is not None:
            bias_V = jnp.asarray(trunk.to_numpy(head.bias)[order_V])
        scale = np.float32(self._problem.train.scale)
        return begun._replace(table_VE=jnp.asarray(table_VD * scale), bias_V=bias_V)

    def _heldout(self):
        """States of the held-out text as the trunk now makes them."""
        windows_WS, labels_WS = self._parts["heldout"]
        parts = []
        with self._pretrained.torch.no_grad():
            for at in range(0, len(windows_WS), 8):
                parts.append(trunk.to_numpy(self._hidden(windows_WS[at : at + 8])))
        labels_N = self._place_V[labels_WS.reshape(-1)]
        both = data.halves([Tokens(np.concatenate(parts), labels_N)])
        scale = self._problem.train.scale
        return Heldout(*(Rows(half, scale) for half in both))


@functools.partial(jax.jit, static_argnames=("head", "options"))
def _gradients(
    params, table_VD, bias_V, hidden_TD, labels_T, order_V, scale, *, head, options
):
    def loss(params, table_VD, bias_V, hidden_TD):
        words = table_VD[order_V] * scale, bias_V[order_V]
        tokens = hidden_TD / scale, labels_T
        return head.loss(params, *words, *tokens, reduction="mean", options=options)

    arrays = (params, table_VD, bias_V, hidden_TD)
    value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*arrays)
    return Gradients(value, *grads)


@functools.partial(jax.jit, static_argnames="training")
def _update(params, opt_state, grads, rate, *, training):
    return trial.updated(params, opt_state, grads, rate, training)
