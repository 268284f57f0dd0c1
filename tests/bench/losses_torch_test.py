"""The losses of torch, with libraries that are written here in place of the real."""

import sys
import types

import pytest

from softbottle.bench import libraries, problem, race, worker

torch = pytest.importorskip("torch")

CASE = problem.Case("odd", tokens=11, components=3, dim=7, vocab=37)


def cross_entropy(x, weight, target, bias, reduction):
    logits = x.float() @ weight.float().T
    if bias is not None:
        logits = logits + bias.float()
    return torch.nn.functional.cross_entropy(logits, target, reduction=reduction)


class Forgetful(torch.autograd.Function):
    """A loss per row that takes the sum's cotangent for every row's."""

    @staticmethod
    def forward(ctx, x, weight, target):
        ctx.save_for_backward(x, weight, target)
        return cross_entropy(x, weight, target, None, "none")

    @staticmethod
    def backward(ctx, nll_bar):
        x, weight, target = ctx.saved_tensors
        x, weight = (array.detach().requires_grad_() for array in (x, weight))
        with torch.enable_grad():
            value = cross_entropy(x, weight, target, None, "sum")
        return *torch.autograd.grad(value, (x, weight)), None


@pytest.fixture
def asked(monkeypatch):
    """Installs the libraries; the reductions that they are asked for."""
    reductions = []

    def loss(x, weight, target, bias=None, *, reduction="mean"):
        assert x.dim() == 2 and x.shape[:1] == target.shape
        reductions.append(reduction)
        return cross_entropy(x, weight, target, bias, reduction)

    def by_rows(x, weight, target):
        return loss(x, weight, target, reduction="none")

    def quack_func(x, weight, bias, target, *, reduction, inplace_backward):
        assert inplace_backward
        return loss(x, weight, target, bias, reduction=reduction)

    def cut(x, weight, target, *, bias=None, reduction):
        return loss(x, weight, target, bias, reduction=reduction)

    scaled = types.SimpleNamespace(apply=by_rows)
    hopper = types.SimpleNamespace(liger_fused_linear_cross_entropy_sm90=loss)
    stubs = {
        "cut_cross_entropy": {"linear_cross_entropy": cut},
        "liger_kernel": {},
        "liger_kernel.transformers.functional": {
            "liger_fused_linear_cross_entropy": loss
        },
        "liger_kernel.ops": {"LigerFusedLinearScaledCrossEntropyFunction": scaled},
        "liger_kernel.ops.cutedsl.ops": {"fused_linear_cross_entropy_sm90": hopper},
        "quack": {},
        "quack.linear_cross_entropy": {
            "chunked_linear_cross_entropy": loss,
            "linear_cross_entropy_func": quack_func,
        },
    }
    for name, members in stubs.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))
    return reductions


def run(peer, components, check_flop=1e12):
    case = CASE._replace(components=components)
    task = race.head_task(case, libraries.variant(peer).name, "loss", 3)
    task |= {"peer": peer, "seconds": 0.001, "check_flop": check_flop}
    return worker.in_process(libraries.TORCH, task)


@pytest.mark.parametrize(
    "peer, components, reduction, bias",
    [
        ("cce", 3, "none", True),
        ("liger", 3, "none", True),
        ("liger", 1, "mean", True),
        ("liger-cute", 1, "mean", False),
        ("liger-rows", 3, "none", False),
        ("liger-rows", 1, "none", False),
        ("quack", 1, "mean", False),
        ("quack-rows", 3, "none", True),
        ("quack-rows", 1, "none", True),
    ],
)
def test_a_library_gives_the_loss_and_gradient_of_a_mixture(
    asked, peer, components, reduction, bias
):
    row = run(peer, components)
    assert row["status"] == "ok", row
    assert set(asked) == {reduction}
    assert row["loss_error"] < 1e-5, "the truth has a bias if the peer has one"
    inputs = ["log_prior", "context", "table", *(["bias"] if bias else [])]
    errors = [name for name in row if name.startswith("error_")]
    assert errors == [f"error_{name}" for name in inputs]
    assert max(row[name] for name in errors) < 5e-3
    assert row["bias"] is bias and row["ms"] > 0
    assert row["variant"].endswith("no bias") is not bias


def test_a_release_of_cut_cross_entropy_without_a_bias_gets_a_column(
    asked, monkeypatch
):
    def cut(x, weight, target, *, reduction):
        assert x.shape[1] == weight.shape[1] == 7 + 16
        return cross_entropy(x, weight, target, None, reduction)

    monkeypatch.setattr(sys.modules["cut_cross_entropy"], "linear_cross_entropy", cut)
    row = run("cce", 3)
    assert row["status"] == "ok" and row["loss_error"] < 1e-5
    assert row["error_bias"] < 5e-3 and row["error_table"] < 5e-3


def test_a_library_that_forgets_the_cotangent_is_refused(asked, monkeypatch):
    name = "LigerFusedLinearScaledCrossEntropyFunction"
    monkeypatch.setattr(sys.modules["liger_kernel.ops"], name, Forgetful)
    row = run("liger-rows", 3)
    assert row["status"] == "wrong" and "error_context" in row["reason"]
    assert row["loss_error"] < 1e-5 and "ms" not in row


def test_a_peer_without_a_bias_is_checked_on_its_first_tokens(asked):
    row = run("liger-rows", 3, 5.5 * 3 * CASE.product_flop / CASE.tokens)
    assert row["status"] == "ok" and row["checked_tokens"] == 5


def test_a_library_that_is_missing_or_refuses_costs_its_row(asked, monkeypatch):
    def refuse(*arguments, **options):
        raise NotImplementedError("needs V to be a multiple of 256")

    module = sys.modules["quack.linear_cross_entropy"]
    monkeypatch.setattr(module, "chunked_linear_cross_entropy", refuse)
    row = run("quack", 1)
    assert row["status"] == "failed"
    assert row["reason"] == "NotImplementedError: needs V to be a multiple of 256"
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", None)
    assert run("quack-rows", 3)["reason"].startswith("ModuleNotFoundError")


def test_an_lstm_runs_in_three_formats():
    result = race.lstm(worker.in_process, ["tiny"], [], ["torch"], seconds=0.001)
    rows = {row["variant"]: row for row in result["rows"]}
    assert all(row["status"] == "ok" for row in rows.values()), rows
    worst = {name: row["gradient_error"] for name, row in rows.items()}
    assert worst["torch float32"] < 1e-5
    # Eleven bits of mantissa against eight.
    assert worst["torch float32"] < worst["torch float16"] < 5e-3
    assert worst["torch float16"] < worst["torch bfloat16"] < 3e-2
