"""A run, and what is shown at its end (ending.py).

The training loop imports none of that; it is handed to the loop as `at_end`. And it is
imported when the end has come: a first step does not wait for matplotlib and SciPy.
"""

import pathlib
from typing import Any

import jax

from softbottle import config as config_lib
from softbottle.training import loop


def run(config: config_lib.Config, workdir: pathlib.Path | str) -> dict[str, Any]:
    """Train a model, or resume training it, measure it, and print a table.

    Arguments, returned value and errors are those of `loop.run`. A synthetic corpus
    adds the divergence from its truth, templates add the accuracy on their answers, and
    `train.same_width_softmax` and `train.equal_softmax` the same of softmaxes, which
    are trained in folders of these names in `workdir`.

    Raises:
        ValueError: also if templates are not read as lines that end in an answer, or
            a run that starts from another's parameters wants softmaxes beside it.
    """
    data, train = config.data, config.train
    if data.name == "templates" and data.unit != "answers":
        raise ValueError(
            "a run on templates is measured on their answers: data.unit must be "
            f"'answers', got {data.unit!r}."
        )
    if train.init_from and (train.equal_softmax or train.same_width_softmax):
        raise ValueError(
            f"train.init_from={train.init_from!r} is no start for the softmaxes that "
            "train.equal_softmax and train.same_width_softmax train beside the run: "
            "set one or the other."
        )
    summary = loop.run(config, workdir, at_end=_measure)
    if summary and jax.process_index() == 0:
        from softbottle.experiments import ending

        print(ending.told(config, workdir, summary))
    return summary


def _measure(ended):
    from softbottle.experiments import ending

    return ending.measure(ended)
