"""A language model: table, backbone and head, and pure methods of their parameters.

    embedded = rowdrop(table)[ids];  hidden, raw = backbone(embedded);
    nll      = head(gain * hidden)
    loss     = sum nll / count + alpha mean(hidden^2) + beta mean((raw_t+1 - raw_t)^2)

The model owns the table and the bias. The means of the two penalties (AR on the
dropped states, TAR on the raw ones) run over real positions only, so that padding a
batch changes nothing. With `config.cache` the likelihood is that of the head and a
cache of the positions of the same segment of the same row (TRIME), and the ranking
loss of HistAlign is another penalty.
"""

import copy
import dataclasses
import functools
import json
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from softbottle import config as config_lib
from softbottle import heads, sharding
from softbottle.backbones import check_layers, dropout, read_widths
from softbottle.backbones import make as make_backbone
from softbottle.data.batches import Batch
from softbottle.heads import cache
from softbottle.ops import device as device_lib
from softbottle.ops.device import Device
from softbottle.ops.mixture import api, rows
from softbottle.ops.mixture.implementation import Choice
from softbottle.ops.mixture.options import Options

Params = dict[str, Any]


class Loss(NamedTuple):
    """Sum of the negative log-likelihoods, number of tokens, and mean penalty."""

    total: jax.Array
    tokens: jax.Array
    penalty: jax.Array


class Choices(NamedTuple):
    """How a training step is computed, as far as it depends on the device.

    Attributes:
        implementation: of the head's loss.
        block_tokens: tokens that the loss takes at a time, per device.
        recurrence: of the LSTM's layers; None without one.
    """

    implementation: str
    block_tokens: int
    recurrence: str | None

    def __str__(self) -> str:
        """A line of it."""
        line = f"loss by {self.implementation}, {self.block_tokens:,} tokens at a time"
        return line + (f", LSTM by {self.recurrence}" if self.recurrence else "")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as a value: its settings, and pure methods of its parameters.

    On a mesh `loss`, `nll`, `cached_nll` and `hidden` take parameters and batches that
    sharding.py has placed there; the head's own methods know nothing of it.

    Attributes:
        config: the settings.
        vocab: how many words there are.
        head: the output head.
        mesh: the devices that share the work; None is one device.
    """

    config: config_lib.Config
    vocab: int
    head: heads.Head
    mesh: Mesh | None = None

    def __hash__(self) -> int:
        """Equal settings have equal hashes."""
        settings = json.dumps(config_lib.to_dict(self.config), sort_keys=True)
        return hash((settings, self.vocab, self.head, self.mesh))

    @property
    def cached(self) -> heads.Cached:
        """The head joined with a cache."""
        return heads.cached(self.head)

    @functools.cached_property
    def device(self) -> Device:
        """What the model runs on."""
        if self.mesh is None:
            return device_lib.at_hand()
        return Device.of(self.mesh.devices.flat[0], self.mesh.size)

    @property
    def compiler_options(self) -> dict[str, bool] | None:
        """Options of `jax.jit` for whole steps.

        Of the GEMMs of a step on a GPU, XLA also writes variants in Triton, compiles
        them and times them. Where a kernel of ours computes the recurrence, a step is
        compiled in much less time without, and is no slower; other LSTMs and
        transformers may be slower (docs/results/step.md). Who names the option in
        XLA_FLAGS decides.
        """
        option = "xla_gpu_enable_triton_gemm"
        rows = self.config.data.rows // self.config.optim.accumulate
        if self.backbone.recurrence(rows) != "persistent":
            return None
        named = option in os.environ.get("XLA_FLAGS", "")
        return None if named else {option: False}

    @functools.cached_property
    def backbone(self) -> Any:
        """What is between the embedded words and the head; see backbones.make."""
        head = self.head
        return make_backbone(self.config, self.device, head.layers, head.positions)

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """The widths of the states that the head reads side by side."""
        return read_widths(self.config, self.head.layers, self.head.positions)

    @functools.cached_property
    def options(self) -> Options:
        """How the head's operations are computed on the model's devices."""
        head = self.config.head
        budget = head.budget_mib
        options = Options(
            compute_dtype=self.config.model.compute_dtype,
            vocab=self.vocab,
            budget_bytes=None if budget is None else budget * 2**20,
            implementation=head.implementation,
        )
        return options.resolve(self.device)

    def choices(self) -> Choices:
        """How a training step of the config's batches is computed."""
        data, shape = self.config.data, jax.ShapeDtypeStruct
        splits = dict(self.mesh.shape) if self.mesh else {}
        by_data, by_model = splits.get(sharding.DATA, 1), splits.get(sharding.MODEL, 1)
        rows = data.rows // self.config.optim.accumulate
        tokens = rows * data.length // by_data
        output = self.output(jax.eval_shape(self.init, jax.random.key(0)))
        table_VE = shape((len(output[1]) // by_model, output[1].shape[1]), "float32")
        found: list[Choice] = []

        def look(params, hidden_TD):
            mixture, g = self.head.mix(params, hidden_TD), self.head.activation(params)
            found.append(api.choice(mixture.context_TKE, table_VE, g, self.options))

        width, dtype = sum(self.hidden_dims), self.config.model.compute_dtype
        jax.eval_shape(look, output[0], shape((tokens, width), dtype))
        recurrence = self.backbone.recurrence(rows)
        (chosen,) = found
        return Choices(chosen.implementation, chosen.block_tokens, recurrence)

    def init(self, key: jax.Array, bias_V: jax.Array | None = None) -> Params:
        """The parameters that a training starts from; the bias is zero if not given."""
        table_key, output_key, backbone_key, head_key = jax.random.split(key, 4)
        model, width = self.config.model, config_lib.context_dim(self.config)
        rows = -(-self.vocab // model.vocab_multiple) * model.vocab_multiple

        def table(key, dim):
            span = model.table_range
            return jax.random.uniform(key, (rows, dim), minval=-span, maxval=span)

        if bias_V is None:
            bias_V = jnp.zeros(self.vocab)
        embedded_11E = jnp.zeros((1, 1, model.embed_dim), model.compute_dtype)
        params = {
            "table_VE": table(table_key, model.embed_dim),
            "bias_V": jnp.pad(bias_V, (0, rows - self.vocab)),
            "backbone": self.backbone.init(
                backbone_key,
                embedded_11E,
                self.initial_carry(1),
                jnp.ones((1, 1), jnp.int32),
                train=False,
            ).get("params", {}),
            "head": self.head.init_wide(head_key, self.hidden_dims, width),
        }
        if not model.tied:
            params["output_VE"] = table(output_key, width)
        return params

    def initial_carry(self, rows: int) -> Any:
        """The backbone's state before any text."""
        return self.backbone.initial_carry(rows)

    def output(self, params: Params) -> tuple[Params, jax.Array, jax.Array]:
        """(head params, table_VE, bias_V), the first arguments of a head's methods."""
        table_VE = params["table_VE" if self.config.model.tied else "output_VE"]
        return params["head"], table_VE, params["bias_V"]

    def loss(
        self, params: Params, batch: Batch, carry: Any, key: jax.Array
    ) -> tuple[Loss, Any]:
        """What a step minimizes, with dropout.

        Args:
            params: of `init`.
            batch: as data/batches.py has them.
            carry: of `initial_carry` or the batch before.
            key: of the dropout masks.

        Returns:
            The loss, and the carry for the next batch.
        """
        trunk_key, latent_key = jax.random.split(key)
        states = self._trunk(params, batch, carry, trunk_key)
        hidden_BSD = self.read(states.hidden_BSD)
        output, cache_config = self.output(params), self.config.cache
        mask = self._latent_mask(latent_key, batch.ids_BS.shape)
        keywords = {"latent_mask": mask, "options": self.options}
        tokens: tuple[Any, Any, Any] = (
            hidden_BSD,
            batch.labels_BS,
            batch.weights_BS,
        )
        penalty = _penalty(self.config.regularise, states, batch.weights_BS)
        if self.config.regularise.balance:
            penalty += self.config.regularise.balance * self._unevenness(
                output[0], hidden_BSD, batch.weights_BS
            )
        if cache_config.objective == "plain":
            if self.head.draws:
                keywords["key"] = jax.random.fold_in(latent_key, 1)
            total = self._split(self.head.loss, total=True)(
                *output, *map(_flat, tokens), **keywords
            )
        else:
            memory = _history(hidden_BSD, batch)
            total = self._split(self.cached.loss, total=True)(
                *output, *tokens, memory, **keywords
            )
            if cache_config.objective == "histalign":
                margin = cache_config.margin
                misranked = cache.ranking_loss(output[1], *tokens, memory, margin)
                penalty += cache_config.alpha * misranked
        return Loss(total, jnp.sum(batch.weights_BS), penalty), states.carry

    def hidden(self, params: Params, batch: Batch, carry: Any) -> tuple[jax.Array, Any]:
        """(hidden_BSD, carry): what the head reads, without dropout."""
        states = self._trunk(params, batch, carry, None)
        return self.read(states.hidden_BSD), states.carry

    def read(self, hidden: jax.Array) -> jax.Array:
        """What the head reads of the backbone's states: `model.gain` times them."""
        gain = self.config.model.gain
        return hidden if gain == 1 else gain * hidden

    def nll(self, params: Params, batch: Batch, carry: Any) -> tuple[jax.Array, Any]:
        """(nll_BS, carry), without dropout; 0 in padding."""
        hidden_BSD, carry = self.hidden(params, batch, carry)
        labels_T = _flat(_known_labels(batch))
        tokens = (_flat(hidden_BSD), labels_T)
        nll_T = self._split(self.head.nll)(
            *self.output(params), *tokens, options=self.options
        )
        return _where_real(batch, nll_T.reshape(batch.labels_BS.shape)), carry

    def cached_nll(
        self, params: Params, batch: Batch, carry: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """(nll_BS, hit_BS, carry): `nll` with a cache of the batch's own history.

        `hit_BS` says where the cache alone finds the label.
        """
        hidden_BSD, carry = self.hidden(params, batch, carry)
        memory = _history(hidden_BSD, batch)
        tokens = (hidden_BSD, _known_labels(batch), memory)
        nll_BS = self._split(self.cached.nll)(
            *self.output(params), *tokens, options=self.options
        )
        hit_BS = cache.best_words(hidden_BSD, memory) == batch.labels_BS
        hit_BS &= batch.weights_BS != 0
        return _where_real(batch, nll_BS), hit_BS, carry

    def _split(self, function, *, total=False):
        return sharding.vocabulary_parallel(self.mesh, function, total=total)

    def _trunk(self, params, batch, carry, key):
        keys = None if key is None else jax.random.split(key)
        embedded_BSE = self._embed(params["table_VE"], batch.ids_BS, keys)
        return self.backbone.apply(
            {"params": sharding.constrain(self.mesh, params["backbone"], P())},
            embedded_BSE.astype(self.config.model.compute_dtype),
            carry,
            batch.segments_BS,
            train=key is not None,
            rngs=None if key is None else {"dropout": keys[1]},
        )

    def _embed(self, table_VE, ids_BS, keys):
        """Rows of the table, whole rows of it dropped in training."""
        if self.mesh is None:
            embedded_TE = rows.lookup(table_VE, ids_BS.reshape(-1))
            embedded_BSE = embedded_TE.reshape(*ids_BS.shape, -1)
        else:
            embedded_BSE = sharding.lookup(self.mesh, table_VE, ids_BS)
        rate = self.config.regularise.rows
        if keys is None or not rate:
            return embedded_BSE
        # Only the input is masked: the tied output table keeps all of its rows.
        mask_V = dropout.elements(keys[0], rate, len(table_VE))
        return embedded_BSE * mask_V[ids_BS][:, :, None]

    def _unevenness(self, params, hidden_BSD, weights_BS):
        """The squared coefficient of variation of the components' summed weights."""
        hidden_TD, weights_T = _flat(hidden_BSD), _flat(weights_BS)
        hidden_TD = jnp.where(weights_T[:, None] != 0, hidden_TD, 0)
        prior_TK = jnp.exp(self.head.log_prior(params, hidden_TD))
        share_K = jnp.einsum("t,tk->k", weights_T, prior_TK)
        return jnp.var(share_K) / jnp.maximum(jnp.square(jnp.mean(share_K)), 1e-12)

    def _latent_mask(self, key, shape):
        """A locked mask of the contexts, [T, K, E]: one per row, shared over time."""
        rate = self.config.regularise.latent
        if not rate:
            return None
        (rows, positions), components = shape, self.head.contexts
        width = config_lib.context_dim(self.config)
        mask_BKE = dropout.elements(key, rate, rows, components, width)
        mask_BSKE = jnp.broadcast_to(
            mask_BKE[:, None], (rows, positions, components, width)
        )
        return _flat(mask_BSKE)


def make_head(config: config_lib.Config) -> heads.Head:
    """The head of a config.

    Raises:
        ValueError: if `config.head` has a setting that is not the head's or out of its
            range, or the widths or layers of `config.model` do not go with the head.
    """
    head, width = heads.from_config(config.head), config_lib.context_dim(config)
    check_layers(config, head.layers)
    try:
        head.check_widths(config.model.last_dim, width)
    except ValueError as error:
        raise ValueError(
            f"head.name={config.head.name}: {error} hidden_dim is model.last_dim; "
            "context_dim is model.context_dim, or model.embed_dim where that is not "
            "set or model.tied is."
        ) from error
    return head


def make(config: config_lib.Config, vocab: int, mesh: Mesh | None = None) -> Model:
    """The model of a config over a vocabulary of this many words.

    It keeps a copy of the config, which may change afterwards.

    Raises:
        ValueError: as `make_head`; if the head does not fit so many words, or is no
            mixture and `regularise.balance` is set.
    """
    head = make_head(config)
    try:
        head.check_words(vocab)
    except ValueError as error:
        raise ValueError(f"head.{error}") from error
    model = Model(copy.deepcopy(config), vocab, head, mesh)
    if config.regularise.balance and _components(model) == 1:
        raise ValueError(f"regularise.balance is for a mixture, and {head!r} is none.")
    return model


def _components(model):
    """How many weights the head's prior has."""
    width = config_lib.context_dim(model.config)

    def log_prior(key):
        params = model.head.init_wide(key, model.hidden_dims, width)
        return model.head.log_prior(params, jnp.zeros((1, sum(model.hidden_dims))))

    return jax.eval_shape(log_prior, jax.random.key(0)).shape[1]


def count_parameters(params: Any, vocab: int) -> int:
    """Trained numbers, counting only the table rows that are words."""
    tables = [params[name] for name in ("table_VE", "output_VE") if name in params]
    padding = sum(table.size // len(table) * (len(table) - vocab) for table in tables)
    padding += len(params["bias_V"]) - vocab
    return sum(leaf.size for leaf in jax.tree.leaves(params)) - padding


def step_flop(config: config_lib.Config, params: Any, tokens: int) -> int:
    """6 flop a token and parameter, those of the output table for each component.

    What a training step computes, but for attention's products of states. The rows of
    the input table are looked up, which is no product.
    """
    table = params["table_VE" if config.model.tied else "output_VE"].size
    products = heads.from_config(config.head).products
    tables = ("table_VE", "output_VE")
    others = {name: value for name, value in params.items() if name not in tables}
    total = sum(leaf.size for leaf in jax.tree.leaves(others))
    return 6 * tokens * (total + products * table)


def _penalty(regularise, states, weights_BS):
    """alpha mean(hidden^2) + beta mean((raw_t+1 - raw_t)^2) over real positions."""
    penalty = jnp.zeros(())
    real_BS = (weights_BS != 0).astype(jnp.float32)
    if regularise.activation:
        penalty += regularise.activation * _mean_square(states.hidden_BSD, real_BS)
    if regularise.slowness:
        steps_BSD = states.raw_BSD[:, 1:] - states.raw_BSD[:, :-1]
        penalty += regularise.slowness * _mean_square(steps_BSD, real_BS[:, 1:])
    return penalty


def _mean_square(values_BSD, real_BS):
    square_BS = jnp.mean(jnp.square(values_BSD.astype(jnp.float32)), axis=-1)
    return jnp.sum(square_BS * real_BS) / jnp.maximum(jnp.sum(real_BS), 1.0)


def _history(hidden_BSD, batch):
    return cache.history(hidden_BSD, batch.labels_BS, batch.segments_BS)


def _known_labels(batch):
    """The labels, with a word where padding may hold none."""
    return jnp.where(batch.weights_BS != 0, batch.labels_BS, 0)


def _where_real(batch, nll_BS):
    return jnp.where(batch.weights_BS != 0, nll_BS, 0.0)


def _flat(array_BS):
    return array_BS.reshape(-1, *array_BS.shape[2:])
