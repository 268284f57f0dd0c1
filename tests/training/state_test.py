import json
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest

from softbottle import config as configs
from softbottle.data import corpus
from softbottle.data.vocab import Vocab
from softbottle.training import checkpoint, state
from tests import tiny

VOCAB = Vocab(("<eos>", "b", "c", "d", "e"))
TEXT = {"train": "aa", "valid": "bb", "test": "cc"}


def write(workdir, vocab=VOCAB, **fields):
    state.write_run(workdir, tiny.make_config(**fields), vocab)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run's best parameters, and the parameters."""
    workdir = tmp_path_factory.mktemp("run")
    run = tiny.make_run(tiny.make_config(), VOCAB, seed=5)
    tiny.write_run(workdir, run, step=12)
    return workdir, run.params


def everything_in(workdir):
    return sorted(path.relative_to(workdir) for path in workdir.rglob("*"))


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_run_is_loaded_with_its_config_words_and_best_parameters(trained, kind):
    workdir, params = trained
    run = state.load_run(kind(workdir))
    assert configs.to_dict(run.config) == configs.to_dict(tiny.make_config())
    assert run.vocab == VOCAB
    assert run.step == 12
    chex.assert_trees_all_equal(run.params, params)
    assert run.model.options.vocab == len(VOCAB)


def test_a_run_of_subwords_is_loaded_with_them(tmp_path):
    vocab = Vocab(("<eos>", "Ġa", "b", "Ġ", "a"), subwords=True)
    fields = {"data__subwords": True, "data__vocab_size": 300, "data__name": "text"}
    run = tiny.make_run(tiny.make_config(**fields), vocab)
    tiny.write_run(tmp_path, run)
    loaded = state.load_run(tmp_path).vocab
    assert loaded == vocab and loaded.subwords
    assert "".join(loaded.spell([1, 2, 0, 1])) == " ab\n a"


def test_loading_a_run_leaves_a_save_that_is_under_way_alone(trained):
    workdir, params = trained
    under_way = workdir / "best" / "13.orbax-checkpoint-tmp"
    unsealed = workdir / "best" / "14"
    for folder in (under_way, unsealed):
        (folder / "tree").mkdir(parents=True)
    before = everything_in(workdir)
    try:
        assert state.load_run(workdir).step == 12
        assert everything_in(workdir) == before
    finally:
        for path in (workdir / "best").iterdir():
            if path.name != "12":
                (path / "tree").rmdir()
                path.rmdir()


def test_a_folder_without_a_run_is_an_error_and_stays_empty(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        state.load_run(tmp_path)
    assert everything_in(tmp_path) == []


def seal(workdir, kind="checkpoints"):
    """A complete checkpoint, as far as a start looks at it."""
    (workdir / kind / "5").mkdir(parents=True)
    (workdir / kind / "5" / checkpoint.MANIFEST).write_text("{}")


@pytest.mark.parametrize("kind", ["checkpoints", "best", "series"])
def test_another_setting_is_an_error_that_names_the_field(tmp_path, kind):
    write(tmp_path)
    seal(tmp_path, kind)
    with pytest.raises(ValueError, match="model.hidden_dim: 6 here, 5 there"):
        write(tmp_path, model__hidden_dim=6)


def test_a_start_that_came_to_no_checkpoint_leaves_nothing_to_agree_with(tmp_path):
    state.write_run(tmp_path, tiny.make_config(), VOCAB, TEXT)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)  # not complete
    other = tiny.make_config(model__hidden_dim=6)
    words = Vocab(("<eos>", "c", "b"))
    state.write_run(tmp_path, other, words, TEXT | {"train": "a"})
    assert (
        json.loads((tmp_path / "config.json").read_text())["model"]["hidden_dim"] == 6
    )
    assert Vocab.load(tmp_path / "vocab.txt") == words
    assert state.text_digest(tmp_path)["train"] == "a"


@pytest.mark.parametrize("name", ["config.json", "vocab.txt"])
def test_files_of_something_else_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("of another library")
    with pytest.raises(ValueError, match=f"{name} is not of a run"):
        write(tmp_path)
    assert [path.name for path in everything_in(tmp_path)] == [name]
    assert (tmp_path / name).read_text() == "of another library"


def test_a_setting_younger_than_the_run_has_its_default_there(tmp_path):
    write(tmp_path)
    seal(tmp_path)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    del stored["cache"], stored["head"]["implementation"]
    path.write_text(json.dumps(stored))
    write(tmp_path)
    assert "cache" in json.loads(path.read_text())


def test_how_long_a_run_is_and_where_its_text_lies_may_change(tmp_path):
    write(tmp_path)
    seal(tmp_path)
    write(tmp_path, train__steps=17, data__path="there", data__cache="here")
    assert '"steps": 17' in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    "ours, theirs",
    [("runs/none", "runs/mos"), (None, "runs/mos"), ("runs/mos", None)],
)
def test_another_run_to_start_from_is_an_error_that_leaves_the_stored_one(
    tmp_path, ours, theirs
):
    write(tmp_path, train__init_from=theirs)
    seal(tmp_path)
    with pytest.raises(ValueError, match=r"train.init_from: .* here, .* there\. Use"):
        write(tmp_path, train__init_from=ours, train__steps=17)
    assert state.load_config(tmp_path).train.init_from == theirs


def test_a_run_resumes_where_it_was_moved_to_with_what_it_started_from(tmp_path):
    write(tmp_path / "old", train__init_from="old/mos-seed3/train")
    seal(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = str(tmp_path / "new" / "mos-seed3" / "train")
    write(tmp_path / "new", train__init_from=moved)
    assert state.load_config(tmp_path / "new").train.init_from == moved


@pytest.mark.parametrize(
    "words",
    [("<eos>", "b", "c", "d"), ("<eos>", "c", "b", "d", "e")],
)
def test_another_vocabulary_is_an_error_and_leaves_the_stored_one(tmp_path, words):
    write(tmp_path)
    seal(tmp_path)
    with pytest.raises(ValueError, match=f"vocabulary .{len(words)} words. is not"):
        write(tmp_path, Vocab(words))
    assert Vocab.load(tmp_path / "vocab.txt") == VOCAB


def test_another_text_is_an_error_that_names_the_splits(tmp_path):
    config = tiny.make_config()
    state.write_run(tmp_path, config, VOCAB, TEXT)
    seal(tmp_path)
    state.write_run(tmp_path, config, VOCAB, TEXT)
    changed = TEXT | {"valid": "b", "test": "c"}
    with pytest.raises(ValueError, match=r"valid, test changed \(synthetic\)"):
        state.write_run(tmp_path, config, VOCAB, changed)


def test_a_run_of_a_version_without_hashes_takes_those_of_its_text(tmp_path):
    write(tmp_path)
    seal(tmp_path)
    (tmp_path / "corpus.json").unlink()
    with pytest.warns(UserWarning, match=r"no corpus\.json: .* not checked"):
        state.write_run(tmp_path, tiny.make_config(), VOCAB, TEXT)
    stored = json.loads((tmp_path / "corpus.json").read_text())
    assert stored == TEXT | {"vocab": VOCAB.digest}


def test_trained_parameters_without_their_settings_are_left_alone(tmp_path):
    write(tmp_path)
    seal(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json, which says .* is gone"):
        write(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_model_without_checkpoints_is_not_trained_over(tmp_path):
    write(tmp_path)
    seal(tmp_path, "best")
    with pytest.raises(ValueError, match="no checkpoints to resume from.*init_from="):
        write(tmp_path)
    # A start that came to its first validation and to no checkpoint begins anew.
    (tmp_path / "checkpoints").mkdir()
    write(tmp_path)


def test_words_whose_file_is_gone_are_those_that_the_run_has_kept(tmp_path):
    words = tmp_path / "words.txt"
    VOCAB.save(words)
    run = make_text_run(tmp_path, test="b d\n")
    run.config.data.vocab_file = str(words)
    run = run._replace(vocab=VOCAB)
    text = corpus.digest(corpus.load(run.config.data))
    state.write_run(tmp_path / "run", run.config, VOCAB, text)
    words.unlink()
    # A start that trained nothing has not used its words.
    with pytest.raises(FileNotFoundError, match="words.txt"):
        state.load_corpus(tmp_path / "run", run, "test")
    seal(tmp_path / "run")
    found = state.load_corpus(tmp_path / "run", run, "test")
    assert found.vocab == VOCAB and corpus.digest(found) == text


def make_text_run(folder, test):
    for name, text in {"train": "b c d e\n", "valid": "c d\n", "test": test}.items():
        (folder / f"{name}.txt").write_text(text * 9)
    return tiny.make_run(
        tiny.make_config(
            data__name="text", data__path=str(folder), data__cache=str(folder / "c")
        ),
        Vocab(("b", "c", "d", "e", "<eos>")),
    )


def test_the_corpus_of_a_run_has_its_words_and_its_text(tmp_path):
    run = make_text_run(tmp_path, test="b d\n")
    text = corpus.digest(corpus.load(run.config.data))
    state.write_run(tmp_path / "run", run.config, run.vocab, text)
    assert state.load_corpus(tmp_path / "run", run, "test").vocab == run.vocab
    changed = make_text_run(tmp_path, test="d b\n")
    state.load_corpus(tmp_path / "run", changed, "valid")
    for splits in (("test",), ("valid", "test")):
        with pytest.raises(
            ValueError, match=r"the test text is not .*test\.txt changed"
        ):
            state.load_corpus(tmp_path / "run", changed, *splits)
    (tmp_path / "train.txt").write_text("c b d e\n")
    with pytest.raises(ValueError, match="has 5 words that are not the 5"):
        state.load_corpus(tmp_path / "run", changed, "valid")


def test_no_file_of_a_run_is_written_again_when_it_is_equal(tmp_path):
    write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("words", ["", "<eos>\nb\nc\nd\nf\n"])
def test_a_damaged_vocabulary_is_not_read_as_the_runs_own(trained, tmp_path, words):
    shutil.copytree(trained[0], tmp_path / "run")
    (tmp_path / "run" / "vocab.txt").write_text(words)
    with pytest.raises(ValueError, match="vocab.txt"):
        state.load_run(tmp_path / "run")


@pytest.mark.parametrize("name", ["config.json", "corpus.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_file_that_is_no_json_is_named(trained, tmp_path, name, content):
    shutil.copytree(trained[0], tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    for use in (state.load_run, write):
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            use(tmp_path / "run")


@pytest.mark.parametrize(
    "values", [{"what": 1}, {"what": {}}, {"seed": {"a": 1}}, {"data": 3}]
)
def test_a_config_with_other_fields_is_told(trained, tmp_path, values):
    shutil.copytree(trained[0], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ValueError, match="has no field|must be"):
        state.load_run(tmp_path / "run")


def test_a_state_is_a_pytree():
    made = state.TrainState(jnp.zeros((), jnp.int32), {"a": jnp.ones(3)}, (), ())
    doubled = jax.tree.map(lambda leaf: 2 * leaf, made)
    assert isinstance(doubled, state.TrainState)
    chex.assert_trees_all_equal(doubled.params, {"a": 2 * jnp.ones(3)})
