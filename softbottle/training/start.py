"""What a run begins with: its parts, the state that it goes on from, and its programs.

A new run has the state of its seed, or the parameters of another run; one that was
stopped has its newest checkpoint. A start that is refused leaves nothing behind for the
next one to agree with.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from softbottle import config as config_lib
from softbottle import distributed, sharding
from softbottle import model as model_lib
from softbottle.data import corpus as corpus_lib
from softbottle.data import lines
from softbottle.data.batches import Stream
from softbottle.data.vocab import Corpus
from softbottle.training import checkpoint, evaluate, lock, optim, programs, readme
from softbottle.training import state as state_lib
from softbottle.training import step as step_lib
from softbottle.training.state import TrainState

# Batches that are looked at for the order in which their widths are wanted.
_AHEAD = 50


@dataclasses.dataclass
class History:
    """What the loop itself remembers; saved with every checkpoint."""

    losses: list[float] = dataclasses.field(default_factory=list)  # validation
    best: float = math.inf
    evaluated: int = -1  # the step of the last validation
    seconds: float = 0.0
    window: tuple[float, float, int] = (0.0, 0.0, 0)  # metrics not yet reported
    stopped: bool = False


class Trainer(NamedTuple):
    """The parts of a run that do not change."""

    config: config_lib.Config
    workdir: pathlib.Path
    lock: lock.Lock | None
    mesh: Mesh | None
    corpus: Corpus
    model: model_lib.Model
    step: jax.stages.Wrapped
    evaluate: Callable[..., evaluate.Evaluation]
    stream: Stream | lines.Lines
    latest: checkpoint.Checkpoints
    best: checkpoint.Checkpoints
    series: checkpoint.Checkpoints | None


def prepare(
    config: config_lib.Config, workdir: pathlib.Path, held: lock.Lock | None
) -> Trainer:
    """Read the text, make the model and open the checkpoints.

    Args:
        config: a run's settings, validated.
        workdir: its folder.
        held: the lock of the folder, in the process that holds it.

    Raises:
        ValueError: as `loop.run`; nothing is written then.
    """
    mesh = sharding.make_mesh(config.mesh)
    data, train = config.data, config.train
    sharding.check_rows(mesh, data.rows, config.optim.accumulate)
    corpus = corpus_lib.load(state_lib.with_own_words(workdir, data))
    model = model_lib.make(config, len(corpus.vocab), mesh)
    tx = optim.make(config.optim)
    step_lib.check_memory(config, model, tx, mesh)
    cut = lines.cut(data, corpus.vocab)
    for name in ("valid", "test"):
        evaluate.check_text(name, corpus.splits[name], data.eval_length, cut)
    share = {
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    try:
        stream = lines.stream(data, corpus.vocab, corpus.train, config.seed, **share)
    except ValueError as error:
        sizes = f"data.rows={data.rows} and data.length={data.length}"
        raise ValueError(f"the train text does not go with {sizes}: {error}") from error
    # Last, so that a start that is refused leaves nothing for the next to agree with.
    if jax.process_index() == 0:
        text = corpus_lib.digest(corpus)
        state_lib.write_run(workdir, config, corpus.vocab, text)
        readme.write(workdir, workdir)
    distributed.barrier("the run is written")
    cached = config.cache.objective != "plain"
    return Trainer(
        config,
        workdir,
        held,
        mesh,
        corpus,
        model,
        step_lib.make_step(config, model, tx, mesh),
        evaluate.make_evaluator(model, cached=cached, cut=cut, mesh=mesh),
        stream,
        checkpoint.Checkpoints(workdir / "checkpoints", train.keep),
        checkpoint.Checkpoints(workdir / "best", 1, required=False),
        checkpoint.Checkpoints(workdir / "series", None, required=False)
        if train.series
        else None,
    )


def resume(trainer: Trainer) -> tuple[TrainState, History]:
    """The newest checkpoint's state and history, or those of a new run.

    The stream of batches is where that state has come to.
    """
    config, mesh = trainer.config, trainer.mesh
    tx = optim.make(config.optim)
    if trainer.latest.latest() is None:
        state, history = _first_state(trainer, tx), History()
    else:
        like = step_lib.abstract_state(config, trainer.model, tx, mesh)
        state, host = trainer.latest.restore(like)
        trainer.stream.seek(host["position"])
        history = History(**host["history"])
        # The patience may be a longer one than when it ended the run.
        history.stopped = history.stopped and optim.should_stop(
            config.train.stop_patience, history.losses
        )
    # Checkpoints after the step that the run resumes from will be written again.
    for checkpoints in (trainer.best, trainer.series):
        if checkpoints is not None:
            checkpoints.forget_after(int(state.step))
    if (best := _best_loss(trainer)) != history.best:
        # The validation of this step came after its checkpoint, and is not done again:
        # rounded otherwise it may be better, and its step is there already. Or the best
        # was damaged and put aside: an earlier one is the best so far, or none is.
        step = int(state.step)
        validated = trainer.best.latest() == step
        history.best, history.evaluated = best, step if validated else -1
    if mesh is None:
        state = sharding.committed(state)
    return state, history


def _first_state(trainer, tx):
    """The state of a new run, with the parameters of another if it names one."""
    config, mesh, model = trainer.config, trainer.mesh, trainer.model
    bias_V = step_lib.bias_start(config.model, model, trainer.corpus.train)
    state = step_lib.init_state(config, model, tx, mesh, bias_V)
    if not config.train.init_from:
        return state
    start = state_lib.load_run(config.train.init_from, mesh=mesh)
    state_lib.check_same_model(start, config, trainer.corpus.vocab)
    placed = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    init = jax.jit(tx.init, out_shardings=placed)
    return state.replace(params=start.params, opt_state=init(start.params))


def _best_loss(trainer):
    """The validation loss of the parameters that are kept as the best."""
    step = trainer.best.latest()
    if step is None:
        return math.inf
    host = checkpoint.read_host(trainer.workdir / "best", step)
    return host.get("valid_loss", math.inf)


@contextlib.contextmanager
def compile_steps(
    trainer: Trainer,
) -> Iterator[Callable[[int], futures.Future[jax.stages.Compiled]] | None]:
    """The step for every width of a batch, compiled or of an earlier process.

    That of a new run's first batch is begun at once, from shapes: it is lowered while
    the program that makes the first state is compiled.

    Yields:
        See `step.compiling`; None on a mesh, where the step compiles when it is called.
    """
    config, model, stream = trainer.config, trainer.model, trainer.stream
    if trainer.mesh is not None:
        yield None
        return
    kept = None
    if (folder := programs.folder()) is not None:

        def kept(arguments):
            return folder / programs.name(config, model.vocab, arguments)

    like = step_lib.abstract_state(config, model, optim.make(config.optim), None)
    batch, widths = _ahead(stream)
    with step_lib.compiling(
        trainer.step, sharding.on_first_device(like), batch, widths, kept
    ) as program:
        if trainer.latest.latest() is None:
            program(widths[0])
        yield program


def _ahead(stream):
    """The next batch, and the widths of batches in the order of their first use."""
    position = stream.position
    batches = [stream.next() for _ in range(_AHEAD if len(stream.widths) > 1 else 1)]
    stream.seek(position)
    used = dict.fromkeys(batch.ids_BS.shape[1] for batch in batches)
    return batches[0], tuple(used | dict.fromkeys(stream.widths))
