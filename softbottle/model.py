"""A language model: table, backbone and head as pure functions of their parameters.

    embedded = rowdrop(table)[ids];  hidden, raw = backbone(embedded);
    loss     = sum nll / count + alpha mean(hidden^2) + beta mean((raw_t+1 - raw_t)^2)

The model owns the table and the bias. The means of the two penalties (AR on the
dropped states, TAR on the raw ones) run over real positions only, so that padding a
batch changes nothing. With `config.cache` the likelihood is that of the head and a
cache of the positions of the same segment of the same row (TRIME), and the ranking
loss of HistAlign is another penalty.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from softbottle import config as config_lib
from softbottle import heads, sharding
from softbottle.backbones import dropout
from softbottle.backbones import make as make_backbone
from softbottle.heads import cache

SINGLE = ("softmax", "sigsoftmax", "lowrank")


class Loss(NamedTuple):
    """Sum of the negative log-likelihoods, number of tokens, and mean penalty."""

    total: jax.Array
    count: jax.Array
    penalty: jax.Array


class Model(NamedTuple):
    """A model as pure functions.

    Attributes:
        init: key -> params.
        initial_carry: rows -> carry, the state before any text.
        loss: (params, batch, carry, key) -> (Loss, carry), with dropout.
        nll: (params, batch, carry) -> (nll_BS, carry), without; 0 in padding.
        cached_nll: (params, batch, carry) -> (nll_BS, hit_BS, carry), the same with a
            cache of the batch's own history, and whether that alone finds the label.
        hidden: (params, batch, carry) -> (hidden_BSD, carry), without dropout.
        head: the output head.
        cached: the head joined with a cache.
        output: params -> (head params, table_VE, bias_V), a head's first arguments.
        options: of the head's operations.
    """

    init: Callable[..., Any]
    initial_carry: Callable[[int], Any]
    loss: Callable[..., tuple[Loss, Any]]
    nll: Callable[..., tuple[jax.Array, Any]]
    cached_nll: Callable[..., tuple[jax.Array, jax.Array, Any]]
    hidden: Callable[..., tuple[jax.Array, Any]]
    head: heads.Head
    cached: heads.Cached
    output: Callable[[Any], tuple[Any, jax.Array, jax.Array]]
    options: dict[str, Any]


def make_head(config: config_lib.Head) -> heads.Head:
    """The head that a config names."""
    mixed = config.components if config.components > 1 else None
    return {
        "softmax": lambda: heads.softmax(),
        "moc": lambda: heads.moc(config.components),
        "mos": lambda: heads.mos(config.components),
        "sigsoftmax": lambda: heads.sigsoftmax(),
        "moss": lambda: heads.moss(config.components),
        "gss": lambda: heads.gss(config.center, config.slope, mixed),
        "plif": lambda: heads.plif(config.knots, config.span, mixed),
        "lowrank": lambda: heads.lowrank(config.rank),
    }[config.name]()


def make(config: config_lib.Config, vocab: int, mesh: Mesh | None = None) -> Model:
    """The model of a config over a vocabulary of this many words.

    On a mesh `loss`, `nll`, `cached_nll` and `hidden` take parameters and batches that
    sharding.py has placed there; the head's own functions know nothing of it.
    """
    head, backbone = make_head(config.head), make_backbone(config)
    cached = heads.cached(head)
    rows = -(-vocab // config.model.vocab_multiple) * config.model.vocab_multiple
    dtype = jnp.dtype(config.model.compute_dtype)
    options = {
        "compute_dtype": dtype,
        "vocab": vocab,
        "budget_bytes": config.head.budget_mib * 2**20 or None,
        "implementation": config.head.implementation,
    }

    def split(function, total=False):
        return sharding.vocabulary_parallel(mesh, function, total=total)

    def init(key):
        return _init(config, head, backbone, rows, key)

    def output(params):
        table_VE = params["table_VE" if config.model.tied else "output_VE"]
        return params["head"], table_VE, params["bias_V"]

    def trunk(params, batch, carry, key):
        keys = None if key is None else jax.random.split(key)
        embedded_BSE = _embed(config, mesh, params["table_VE"], batch.ids_BS, keys)
        return backbone.apply(
            {"params": sharding.constrain(mesh, params["backbone"], P())},
            embedded_BSE.astype(dtype),
            carry,
            batch.segments_BS,
            train=key is not None,
            rngs=None if key is None else {"dropout": keys[1]},
        )

    def loss(params, batch, carry, key):
        trunk_key, latent_key = jax.random.split(key)
        states = trunk(params, batch, carry, trunk_key)
        mask = _latent_mask(config, latent_key, batch.ids_BS.shape)
        keywords = {"latent_mask": mask, **options}
        tokens = (states.hidden_BSD, batch.labels_BS, batch.weights_BS)
        penalty = _penalty(config.regularise, states, batch.weights_BS)
        if config.cache.objective == "plain":
            total = split(head.loss, True)(
                *output(params), *map(_flat, tokens), **keywords
            )
        else:
            tokens = (*tokens, _history(states.hidden_BSD, batch))
            total = split(cached.loss, True)(*output(params), *tokens, **keywords)
        if config.cache.objective == "histalign":
            table_VE = output(params)[1]
            misranked = cache.ranking_loss(table_VE, *tokens, config.cache.margin)
            penalty += config.cache.alpha * misranked
        return Loss(total, jnp.sum(batch.weights_BS), penalty), states.carry

    def hidden(params, batch, carry):
        states = trunk(params, batch, carry, None)
        return states.hidden_BSD, states.carry

    def nll(params, batch, carry):
        hidden_BSD, carry = hidden(params, batch, carry)
        labels_T = _flat(_known_labels(batch))
        tokens = (_flat(hidden_BSD), labels_T)
        nll_T = split(head.nll)(*output(params), *tokens, **options)
        return _where_real(batch, nll_T.reshape(batch.labels_BS.shape)), carry

    def cached_nll(params, batch, carry):
        hidden_BSD, carry = hidden(params, batch, carry)
        memory = _history(hidden_BSD, batch)
        nll_BS = split(cached.nll)(
            *output(params), hidden_BSD, _known_labels(batch), memory, **options
        )
        hit_BS = cache.best_words(hidden_BSD, memory) == batch.labels_BS
        hit_BS &= batch.weights_BS != 0
        return _where_real(batch, nll_BS), hit_BS, carry

    return Model(
        init,
        backbone.initial_carry,
        loss,
        nll,
        cached_nll,
        hidden,
        head,
        cached,
        output,
        options,
    )


def count_parameters(params: Any, vocab: int) -> int:
    """Trained numbers, counting only the table rows that are words."""
    tables = [params[name] for name in ("table_VE", "output_VE") if name in params]
    padding = sum(table.size // len(table) * (len(table) - vocab) for table in tables)
    padding += len(params["bias_V"]) - vocab
    return sum(leaf.size for leaf in jax.tree.leaves(params)) - padding


def step_flop(config: config_lib.Config, params: Any, tokens: int) -> int:
    """6 flop a token and parameter, those of the table again for each component.

    What a training step computes, but for attention's products of states.
    """
    table = params["table_VE" if config.model.tied else "output_VE"].size
    one = config.head.name in (*SINGLE, "moc")
    products = 1 if one else config.head.components
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    return 6 * tokens * (total + (products - 1) * table)


def with_head(config: config_lib.Config, name: str, width: int) -> config_lib.Config:
    """The same settings with another head and another width of the output table.

    Heads of one component get a last layer of that width, which is all they can read.
    """
    values = config_lib.to_dict(config)
    values["head"] |= {"name": name}
    values["model"] |= {"context_dim": width}
    if name in SINGLE:
        values["head"] |= {"components": 1}
        values["model"] |= {"last_dim": width}
    if config.model.tied:
        values["model"] |= {"embed_dim": width}
    return config_lib.from_dict(values)


def equal_softmax(
    config: config_lib.Config, vocab: int, parameters: int
) -> config_lib.Config:
    """The same settings with the widest softmax of at most this many parameters."""

    def size(width):
        init = make(with_head(config, "softmax", width), vocab).init
        params = jax.eval_shape(init, jax.random.key(0))
        return count_parameters(params, vocab)

    width = 1
    while size(width + 1) <= parameters:
        width += 1
    rival = with_head(config, "softmax", width)
    rival.train.equal_softmax = False
    return rival


def _init(config, head, backbone, rows, key):
    table_key, output_key, backbone_key, head_key = jax.random.split(key, 4)
    model, width = config.model, config_lib.context_dim(config)

    def table(key, dim):
        span = model.table_range
        return jax.random.uniform(key, (rows, dim), minval=-span, maxval=span)

    embedded_11E = jnp.zeros((1, 1, model.embed_dim), model.compute_dtype)
    params = {
        "table_VE": table(table_key, model.embed_dim),
        "bias_V": jnp.zeros(rows),
        "backbone": backbone.init(
            backbone_key,
            embedded_11E,
            backbone.initial_carry(1),
            jnp.ones((1, 1), jnp.int32),
            train=False,
        ).get("params", {}),
        "head": head.init(head_key, model.last_dim, width),
    }
    if not model.tied:
        params["output_VE"] = table(output_key, width)
    return params


def _embed(config, mesh, table_VE, ids_BS, keys):
    """Rows of the table, whole rows of it dropped in training."""
    if mesh is None:
        embedded_BSE = table_VE[ids_BS]
    else:
        embedded_BSE = sharding.lookup(mesh, table_VE, ids_BS)
    rate = config.regularise.rows
    if keys is None or not rate:
        return embedded_BSE
    # Only the input is masked: the tied output table keeps all of its rows.
    mask_V = dropout.elements(keys[0], rate, len(table_VE))
    return embedded_BSE * mask_V[ids_BS][:, :, None]


def _latent_mask(config, key, shape):
    """A locked mask of the contexts, [T, K, E]: one per row, shared over time."""
    rate = config.regularise.latent
    if not rate:
        return None
    rows, positions = shape
    components = 1 if config.head.name in SINGLE else config.head.components
    width = config_lib.context_dim(config)
    mask_BKE = dropout.elements(key, rate, rows, components, width)
    mask_BSKE = jnp.broadcast_to(
        mask_BKE[:, None], (rows, positions, components, width)
    )
    return _flat(mask_BSKE)


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
