"""What words with gates of their own are made of, and their logits by plain products.

gated.py has the formulas and the letters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import gated_tree
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import sum_dtype

# Of gates and of components, a [C, S] array each.
Products = tuple[list[jax.Array], list[jax.Array]]


class Tokens(NamedTuple):
    """Contexts, and what the gates read, of every token."""

    context_TKE: jax.Array
    feature_TJG: jax.Array
    level_TJ: jax.Array


class Words(NamedTuple):
    """The frequent words: rows of the table, and what their gates are made of."""

    vocabulary: Vocabulary
    vector_SG: jax.Array
    offset_SJ: jax.Array


def logits_of(dtype: jnp.dtype, tokens: Tokens, words: Words) -> jax.Array:
    """All logits of a chunk of tokens, [C, S], by products in a dtype."""
    return mixed(products(dtype, tokens, words), tokens, words)


def mixed(products: Products, tokens: Tokens, words: Words) -> jax.Array:
    """The logits from the products, [C, S]."""
    nodes = gated_tree.nodes(*parts(products, tokens, words))
    return nodes[0] + words.vocabulary.bias_V[None]


def products(dtype: jnp.dtype, tokens: Tokens, words: Words) -> Products:
    """Products of the gates' features and of the contexts, [C, S] each."""
    context_CKE, feature_CJG, _ = tokens
    product, table_SE = "ce,se->cs", words.vocabulary.table_VE
    return (
        [
            einsum(product, dtype, feature_CJG[:, j], words.vector_SG).astype(dtype)
            for j in range(feature_CJG.shape[1])
        ],
        [
            einsum(product, dtype, context_CKE[:, k], table_SE)
            for k in range(context_CKE.shape[1])
        ],
    )


def parts(
    products: Products, tokens: Tokens, words: Words
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gates, and the logits that they mix."""
    features, z = products
    gates = [
        jax.nn.sigmoid(
            each_CS.astype(words.offset_SJ.dtype)
            + tokens.level_TJ[:, j, None].astype(words.offset_SJ.dtype)
            + words.offset_SJ[None, :, j]
        )
        for j, each_CS in enumerate(features)
    ]
    return gates, z


def einsum(
    formula: str, dtype: jnp.dtype, left: jax.Array, right: jax.Array
) -> jax.Array:
    """A product that reads a dtype and sums in float32 or better."""
    return jnp.einsum(
        formula,
        left.astype(dtype),
        right.astype(dtype),
        preferred_element_type=sum_dtype(left, right),
    )


def like(tree: Any, other: Any) -> Any:
    """The first tree in the dtypes of the second."""
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tree, other)
