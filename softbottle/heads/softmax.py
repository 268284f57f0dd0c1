"""The ordinary softmax head: P(v) proportional to exp(h . w_v + b_v)."""

from softbottle.heads import base


def softmax() -> base.Head:
    """An ordinary softmax; it has no parameters beside the model's table and bias.

    The matrix of its log-probabilities over contexts has rank at most d + 1, or d + 2
    with an output bias, however many contexts and words there are.
    """
    return single_head("softmax", base.softmax_activation)


def single_head(name: str, activation) -> base.Head:
    """A head of one component that reads the hidden state as its context."""

    def init(key, hidden_dim, context_dim):
        del key
        base.check_same_width(name, hidden_dim, context_dim)
        return {}

    def mix(params, hidden_TD, latent_mask=None):
        del params
        return base.single(hidden_TD, latent_mask)

    return base.mixture_head(init, mix, activation)
