"""Parameter groups, optimisers against arithmetic by hand, schedules against torch's own."""

import math
import warnings

import pytest
import torch
from torch import nn, optim

from retrieval.errors import DmlError
from trainer.config import Optimizer, Schedule
from trainer.losses import build as build_loss
from trainer.run.optimizers import build, rate, restore, saved_state, set_rate


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


@pytest.fixture
def loss():
    return build_loss("ce", 7, 5)


def spec(**options):
    return Optimizer(**{"lr": 0.1, "weight_decay": 0.01, "loss_lr": 4.0, **options})


# groups


@pytest.mark.parametrize("name", ["sgd", "adam", "radam", "adamw"])
def test_decay_is_for_weights_of_two_dimensions_and_more(network, loss, name):
    groups = build(spec(name=name), network, loss).param_groups
    assert [group["name"] for group in groups] == [
        "network/weights",
        "network/others",
        "loss/weights",
        "loss/others",
    ]
    assert [group["weight_decay"] for group in groups] == [0.01, 0, 0.01, 0]
    shapes = [[tuple(p.shape) for p in group["params"]] for group in groups]
    assert shapes == [
        [(4, 3, 3, 3), (5, 16)],
        [(4,), (4,), (4,), (5,)],
        [(7, 5)],
        [(7,)],
    ]


def test_parameters_of_the_loss_learn_loss_lr_times_faster(network, loss):
    groups = build(spec(), network, loss).param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.1, 0.4, 0.4])
    assert [group["base_lr"] for group in groups] == pytest.approx([0.1, 0.1, 0.4, 0.4])


def test_frozen_parameters_and_empty_groups_are_left_out(network):
    network[0].requires_grad_(False)
    network[3].bias.requires_grad_(False)
    groups = build(spec(), network, build_loss("spce", 7, 5)).param_groups
    assert [group["name"] for group in groups] == ["network/weights", "network/others"]
    assert [len(group["params"]) for group in groups] == [1, 2]


def test_parameters_of_an_adapted_loss_are_trained(network):
    groups = build(spec(), network, build_loss("proxy_nca", 7, 5)).param_groups
    assert [tuple(p.shape) for p in groups[-1]["params"]] == [(7, 5)]


def test_nothing_to_train_is_an_error(network):
    with pytest.raises(DmlError, match="nothing to train"):
        build(spec(), network.requires_grad_(False), build_loss("spce", 7, 5))


# steps, by hand


def stepped(name, gradients, **options):
    """A weight (1, 1) and a bias (1,) that start at 2, after steps with the gradients."""
    module = nn.Linear(1, 1).double()
    nn.init.constant_(module.weight, 2.0)
    nn.init.constant_(module.bias, 2.0)
    optimizer = build(spec(name=name, **options), module, nn.Identity())
    for gradient in gradients:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    return module.weight.item(), module.bias.item()


def test_sgd_without_momentum():
    weight, bias = stepped("sgd", [0.5])
    assert weight == pytest.approx(2 - 0.1 * (0.5 + 0.01 * 2))
    assert bias == pytest.approx(2 - 0.1 * 0.5)


def test_sgd_with_momentum_is_nesterovs():
    _, bias = stepped("sgd", [0.5, 0.3], momentum=0.9)
    first = 2 - 0.1 * (0.5 + 0.9 * 0.5)
    assert bias == pytest.approx(first - 0.1 * (0.3 + 0.9 * (0.9 * 0.5 + 0.3)))


def test_adam_adds_decay_to_the_gradient_and_adamw_to_the_weight():
    # Adam's first step is lr times the sign of gradient plus decay.
    assert stepped("adam", [-0.01])[0] == pytest.approx(2 - 0.1, abs=1e-6)  # 0.02 outweighs it
    weight, bias = stepped("adamw", [-0.01])
    assert weight == pytest.approx(2 * (1 - 0.1 * 0.01) + 0.1, abs=1e-6)
    assert bias == pytest.approx(2.1, abs=1e-6)


def test_radam_starts_as_sgd_with_momentum():
    # Below a variance length of 5 RAdam takes the corrected mean: the gradient itself at first.
    assert stepped("radam", [0.5])[1] == pytest.approx(2 - 0.1 * 0.5)


def test_decoupled_decay_of_all_parameters_shrinks_them_by_rate_and_decay():
    settings = {"decoupled": True, "decay_all": True}
    weight, bias = stepped("radam", [0.5], **settings)  # as SGD at first
    assert weight == bias == pytest.approx(2 * (1 - 0.1 * 0.01) - 0.1 * 0.5)
    assert stepped("radam", [0.5])[0] == pytest.approx(2 - 0.1 * (0.5 + 0.01 * 2))
    assert stepped("adam", [0.3] * 4, decoupled=True) == stepped("adamw", [0.3] * 4)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_eps_is_added_to_the_denominator(name):
    # The first step is lr g / (|g| + eps).
    assert stepped(name, [0.5], eps=0.5)[1] == pytest.approx(2 - 0.1 * 0.5)


def test_radam_with_decoupled_decay_is_that_of_the_public_group_loss_code():
    """RAdam by its formulas, with the decay lr * decay * weight, over 30 gradients."""
    gradients = [0.5 * math.sin(step) for step in range(30)]
    settings = {"decoupled": True, "decay_all": True, "eps": 1e-2}
    value, mean, square = 2.0, 0.0, 0.0
    longest = 2 / (1 - 0.999) - 1
    for step, gradient in enumerate(gradients, 1):
        square = 0.999 * square + 0.001 * gradient**2
        mean = 0.9 * mean + 0.1 * gradient
        power = 0.999**step
        length = longest - 2 * step * power / (1 - power)
        value -= 0.01 * 0.1 * value
        size = 0.1 / (1 - 0.9**step)
        if length >= 5:
            ratio = (length - 4) / (longest - 4) * (length - 2) / length * longest / (longest - 2)
            value -= size * math.sqrt((1 - power) * ratio) * mean / (math.sqrt(square) + 1e-2)
        else:
            value -= size * mean
    assert stepped("radam", gradients, **settings) == pytest.approx((value, value), rel=1e-9)


# resuming


@pytest.mark.parametrize("name", ["sgd", "adam", "radam", "adamw"])
def test_state_dict_continues_as_if_never_interrupted(loss, name):
    def run(module, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            set_rate(optimizer, 1 / (step + 1))
            optimizer.zero_grad()
            module(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()

    settings = spec(name=name, momentum=0.9)
    torch.manual_seed(3)
    whole, half, rest = (nn.Linear(6, 5) for _ in range(3))
    half.load_state_dict(whole.state_dict())
    run(whole, build(settings, whole, loss), range(6))
    first = build(settings, half, loss)
    run(half, first, range(3))
    rest.load_state_dict(half.state_dict())
    second = build(settings, rest, loss)
    second.load_state_dict(first.state_dict())
    run(rest, second, range(3, 6))
    assert torch.equal(rest.weight, whole.weight)
    assert torch.equal(rest.bias, whole.bias)


def test_state_dict_carries_the_rate_before_the_schedule(network, loss):
    optimizer = build(spec(), network, loss)
    set_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025, 0.1, 0.1]
    other = build(spec(lr=9.0), network, loss)
    other.load_state_dict(optimizer.state_dict())
    set_rate(other, 0.5)
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.05, 0.2, 0.2]


@pytest.mark.parametrize(
    ("options", "entries"),
    [({"name": "sgd"}, []), ({"name": "sgd", "momentum": 0.9}, [0, 1]), ({"name": "adam"}, [0, 1])],
)
def test_a_sound_state_is_restored_though_not_all_parameters_have_one(network, options, entries):
    """Plain SGD keeps none, and parameters that are frozen or without gradients have none."""
    network[3].requires_grad_(False)
    optimizer = build(spec(**options), network, build_loss("spce", 7, 5))
    network[0].weight.grad = torch.ones_like(network[0].weight)
    network[0].bias.grad = torch.ones_like(network[0].bias)
    optimizer.step()
    saved = saved_state(optimizer)
    assert saved["entries"] == entries
    other = build(spec(**options), network, build_loss("spce", 7, 5))
    restore(other, saved, epoch=1)
    assert sorted(other.state_dict()["state"]) == entries
    del saved["entries"]  # an older checkpoint
    restore(other, saved, epoch=1)


def test_an_older_checkpoint_from_before_the_first_epoch_has_no_state(network, loss):
    optimizer = build(spec(), network, loss)
    saved = optimizer.state_dict()
    restore(optimizer, saved, epoch=0)
    with pytest.raises(ValueError, match="lost their state"):
        restore(optimizer, saved, epoch=1)


# schedules


def rates(schedule, steps_per_epoch):
    return [
        rate(schedule, step, steps_per_epoch) for step in range(schedule.epochs * steps_per_epoch)
    ]


def torch_rates(make, steps):
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR itself calls step with an epoch
        scheduler = make(optimizer)
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return found


def test_cosine_is_that_of_torch():
    expected = torch_rates(lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 35), 35)
    assert rates(Schedule(epochs=5, name="cosine"), 7) == pytest.approx(expected, abs=1e-12)


def test_cosine_with_warmup_is_that_of_the_public_cross_entropy_code():
    def make(optimizer):
        return optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min((i + 1) / 6, (1 + math.cos(math.pi * i / 70)) / 2)
        )

    schedule = Schedule(epochs=10, name="cosine", warmup=6)
    assert rates(schedule, 7) == pytest.approx(torch_rates(make, 70), abs=1e-12)


def test_step_is_multistep_of_torch():
    def make(optimizer):
        return optim.lr_scheduler.MultiStepLR(optimizer, [3 * 4, 5 * 4], 0.2)

    schedule = Schedule(epochs=7, name="step", milestones=(3, 5), factor=0.2)
    assert rates(schedule, 4) == pytest.approx(torch_rates(make, 28), abs=1e-12)


def test_step_falls_after_the_milestone_epoch():
    schedule = Schedule(epochs=3, name="step", milestones=(2, 1), factor=0.1)
    assert rates(schedule, 2) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_warmup_rises_from_its_first_step_to_the_full_rate():
    schedule = Schedule(epochs=20, name="constant", warmup=4)
    assert rates(schedule, 3)[:6] == [0.25, 0.5, 0.75, 1, 1, 1]
    schedule = Schedule(epochs=20, name="step", warmup=4, milestones=(1,), factor=0.5)
    assert rates(schedule, 3)[:6] == [0.25, 0.5, 0.75, 0.5, 0.5, 0.5]


def test_cosine_by_hand():
    half = math.sqrt(0.5)
    found = rates(Schedule(epochs=40, name="cosine", warmup=4), 1)
    assert found[:3] == [0.25, 0.5, 0.75]
    assert found[10::10] == pytest.approx([(1 + half) / 2, 0.5, (1 - half) / 2])
    schedule = Schedule(epochs=8, name="cosine")
    found = rates(schedule, 1)
    assert found[::2] == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2])
    assert rate(schedule, 8, 1) == 0
    assert rate(schedule, 60, 1) == 0


def test_warmup_takes_a_tenth_of_a_short_run_at_most():
    assert rates(Schedule(epochs=20, name="constant", warmup=50), 1)[:3] == [0.5, 1, 1]
    assert rates(Schedule(epochs=1, warmup=10), 3)[0] == 1
    assert rate(Schedule(epochs=1, warmup=3), 3, 3) == 0
