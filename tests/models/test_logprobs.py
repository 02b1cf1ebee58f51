"""Chunked log-probabilities against the plain formula: values, gradients, and that large logits never pile up."""

import pytest
import torch

from gleaner.models.logprobs import chunked_logprobs, chunked_support_logprobs


def make_inputs(tokens=23, hidden=8, vocabulary=31, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return normal(tokens, hidden), normal(vocabulary, hidden), normal(vocabulary), targets


@pytest.mark.parametrize("chunk", [1, 5, 23, 4096])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_plain_formula(chunk, temperature, with_bias):
    hidden, weight, bias, targets = make_inputs()
    used = bias if with_bias else None
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)

    found, entropy = chunked_logprobs(hidden, weight, targets, temperature, chunk, used)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    gradients = torch.autograd.grad((found * upstream).sum(), inputs)

    logits = torch.nn.functional.linear(hidden, weight, used) / temperature
    every = torch.log_softmax(logits, dim=1)
    plain = every.gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(every.exp() * every).sum(1), rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad
    for left, right in zip(gradients, torch.autograd.grad((plain * upstream).sum(), inputs), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_a_second_backward_pass_sees_the_same_probabilities():
    hidden, weight, _, targets = make_inputs()
    found, _ = chunked_logprobs(hidden, weight, targets, chunk=64)
    first = torch.autograd.grad(found.sum(), hidden, retain_graph=True)[0]
    second = torch.autograd.grad(found.sum(), hidden)[0]
    assert torch.equal(first, second)


def test_no_tokens_give_no_logprobs_and_a_zero_gradient():
    hidden, weight, _, _ = make_inputs()
    found, entropy = chunked_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    assert found.shape == entropy.shape == (0,)
    assert torch.autograd.grad(found.sum(), hidden)[0].abs().sum() == 0


def test_bfloat16_hidden_states_give_float32_logprobs():
    hidden, weight, _, targets = make_inputs(dtype=torch.float32)
    found, _ = chunked_logprobs(hidden.bfloat16(), weight.bfloat16(), targets)
    assert found.dtype == torch.float32
    found.sum().backward()
    assert hidden.grad is not None
    exact, _ = chunked_logprobs(hidden, weight, targets)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.1)


def test_the_logits_of_all_tokens_never_exist_at_once():
    tokens, vocabulary, chunk = 256, 5000, 16
    hidden, weight, _, targets = make_inputs(tokens, 4, vocabulary, torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            output = function(*args, **(kwargs or {}))
            for value in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(value, torch.Tensor):
                    largest = max(largest, value.numel())
            return output

    with Watch():
        found, _ = chunked_logprobs(hidden, weight, targets, chunk=chunk)
        found.sum().backward()
    assert largest == chunk * vocabulary


@pytest.mark.parametrize("chunk", [3, 64])
def test_support_logprobs_are_renormalised_and_differentiable(chunk):
    hidden, weight, bias, _ = make_inputs()
    support = torch.argsort(torch.rand(23, 31, generator=torch.Generator().manual_seed(1)), dim=1)[:, :5]
    found = chunked_support_logprobs(hidden, weight, support, 0.7, chunk, bias)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(23, dtype=torch.float64))

    full = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=1).gather(1, support)
    plain = full - torch.logsumexp(full, 1, keepdim=True)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
    upstream = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    left = torch.autograd.grad((found * upstream).sum(), [hidden, weight, bias])
    right = torch.autograd.grad((plain * upstream).sum(), [hidden, weight, bias])
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
