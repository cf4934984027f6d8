"""DreamerV3's dynamics along a sequence, with the backward pass written out.

What does not wait for the step before is computed for all steps at once: the parts of tokens and actions, and the
gradients of all weights, for which the loop leaves the gradients of each layer's outputs behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rl_training.models.rssm import BLOCKS, RSSM, Latent, bounded
from rl_training.ops.dreamer_steps import Steps, as_blocks, as_rows


def observe(
    dynamics: RSSM,
    tokens: Tensor,
    actions: Tensor,
    first: Tensor,
    carry: Latent,
    noise: Tensor,
    steps: Steps,
    dtype: torch.dtype,
) -> tuple[Latent, Tensor]:
    """RSSM.observe, with products in `dtype`. The carry gets no gradient: it is data."""
    kept = (~first.bool()).unsqueeze(-1).to(carry.deter.dtype)
    by_action = dynamics.of_action(bounded(actions * kept))
    trunk = cast(nn.Linear, dynamics.posterior_trunk[0])
    by_token = trunk.weight[:, dynamics.deter :]
    by_token = nn.functional.linear(tokens.to(by_token.dtype), by_token, trunk.bias)
    deter, stoch, probs = Sequences.apply(  # type: ignore[no-untyped-call]
        steps, dtype, by_token, by_action, kept, carry, noise, *parameters(dynamics)
    )
    shape = (*deter.shape[:-1], dynamics.groups, dynamics.classes)
    return Latent(deter, stoch.view(shape)), probs.view(shape)


def parameters(dynamics: RSSM) -> Sequence[Tensor]:
    """What `Weights` and `Sequences` take, in this order."""
    layers = [*dynamics.of_deter.parameters(), *dynamics.of_stoch.parameters()]
    layers += [dynamics.hidden.weight, dynamics.hidden.bias, dynamics.hidden_norm.gain]
    layers += [dynamics.gates.weight, dynamics.gates.bias]
    posterior = dynamics.posterior_logits
    by_deter = cast(Tensor, dynamics.posterior_trunk[0].weight)[:, : dynamics.deter]  # [h, D] for the state
    return [*layers, by_deter, cast(Tensor, dynamics.posterior_trunk[1].gain), posterior.weight, posterior.bias]


class SequenceWeights:
    """The parameters in the type of the products. Norms stay in float32."""

    def __init__(self, values: Sequence[Tensor], dtype: torch.dtype) -> None:
        cast_to = [value.detach().to(dtype) for value in values]
        self.deter, self.deter_bias, _, self.stoch, self.stoch_bias, _, hidden, hidden_bias, _ = cast_to[:9]
        self.deter_gain, self.stoch_gain = values[2].detach(), values[5].detach()
        block = self.deter.shape[1] // BLOCKS
        self.hidden_own = hidden[:, :block]  # [G, D / G, D / G]
        self.hidden_inputs = hidden[:, block:].permute(1, 0, 2).flatten(1)  # [3 h, D]
        self.hidden_bias = hidden_bias
        self.hidden_gain = values[8].detach().view(BLOCKS, 1, -1)
        self.gates, self.gates_bias = cast_to[9], cast_to[10].view(BLOCKS, 1, -1)
        self.posterior, self.posterior_gain = cast_to[11], values[12].detach()
        self.logits, self.logits_bias = cast_to[13], cast_to[14]


class Trace(dict[str, list[Tensor]]):
    """What each step leaves behind, by name."""

    def add(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.setdefault(name, []).append(tensor)

    def rows(self, name: str) -> Tensor:
        """[T N, n] of all steps."""
        return torch.cat(self[name])

    def blocks(self, name: str) -> Tensor:
        """[G, T N, k] of all steps."""
        return torch.cat(self[name], 1)


class Sequences(torch.autograd.Function):
    """(states [T, N, D], samples [T, N, S C], log-probabilities [T, N, S C]) of sequences."""

    @staticmethod
    def forward(
        context: Any,
        steps: Steps,
        dtype: torch.dtype,
        by_token: Tensor,
        by_action: Tensor,
        kept: Tensor,
        carry: Latent,
        noise: Tensor,
        *values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        w, trace = SequenceWeights(values, dtype), Trace()
        by_token, by_action = by_token.to(dtype), by_action.to(dtype)
        deter, stoch = carry.deter, carry.stoch.flatten(1).to(dtype)
        for t in range(len(kept)):
            deter, stoch = deter * kept[t], stoch * kept[t].to(dtype)
            deter = one_step(w, steps, trace, deter, stoch, by_action[t])
            before = torch.addmm(by_token[t], deter.to(dtype), w.posterior.t())
            hidden = steps.norm_silu(before, w.posterior_gain)
            probs, stoch = steps.mixed_sample(torch.addmm(w.logits_bias, hidden, w.logits.t()), noise[t])
            trace.add(deter=deter, posterior_before=before, posterior=hidden, probs=probs, stoch=stoch)
        probs = torch.stack(trace["probs"])
        context.weights, context.trace, context.steps, context.dtypes = w, trace, steps, [v.dtype for v in values]
        context.kept, context.noise = kept, noise
        return torch.stack(trace["deter"]), torch.stack(trace["stoch"]).float(), probs.log()

    @staticmethod
    def backward(context: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        w, trace, steps, back = context.weights, context.trace, context.steps, Trace()
        d_deters, d_stochs, d_log_probs = (d.contiguous() for d in d_outputs)
        d_deter, d_stoch = torch.zeros_like(d_deters[0]), torch.zeros_like(d_stochs[0])
        for t in reversed(range(len(d_deters))):
            d_stoch = d_stoch + d_stochs[t]
            d_logits = steps.mixed_backward(trace["probs"][t], context.noise[t], d_log_probs[t], d_stoch)
            d_logits = d_logits.to(w.logits.dtype)
            d_hidden = d_logits @ w.logits
            d_before = steps.norm_silu_backward(trace["posterior_before"][t], w.posterior_gain, d_hidden)
            d_deter = d_deter + d_deters[t] + (d_before @ w.posterior).float()
            back.add(logits=d_logits, posterior=d_hidden, posterior_before=d_before)
            d_deter, d_stoch = one_step_backward(w, steps, trace, back, t, d_deter)
            d_deter, d_stoch = d_deter * context.kept[t], d_stoch.float() * context.kept[t]
        for reversed_steps in back.values():
            reversed_steps.reverse()
        d_values = weight_gradients(w, steps, trace, back)
        d_tokens, d_actions = torch.stack(back["posterior_before"]), torch.stack(back["by_action"])
        cast_back = (d.to(dtype) for d, dtype in zip(d_values, context.dtypes, strict=True))
        return None, None, d_tokens.float(), d_actions.float(), None, None, None, *cast_back


def one_step(w: SequenceWeights, steps: Steps, trace: Trace, deter: Tensor, stoch: Tensor, by_action: Tensor) -> Tensor:
    """The next state [N, D]."""
    low = deter.to(w.deter.dtype)
    deter_before = torch.addmm(w.deter_bias, low, w.deter.t())
    stoch_before = torch.addmm(w.stoch_bias, stoch, w.stoch.t())
    parts = [steps.norm_silu(deter_before, w.deter_gain), steps.norm_silu(stoch_before, w.stoch_gain), by_action]
    inputs = torch.cat(parts, 1)
    by_inputs = torch.addmm(w.hidden_bias, inputs, w.hidden_inputs)
    before = torch.baddbmm(as_blocks(by_inputs, BLOCKS), as_blocks(low, BLOCKS), w.hidden_own)
    hidden = steps.norm_silu(before, w.hidden_gain)
    gates = torch.baddbmm(w.gates_bias, hidden, w.gates)
    trace.add(old=deter, low=low, old_stoch=stoch, deter_before=deter_before, stoch_before=stoch_before)
    trace.add(inputs=inputs, hidden_before=before, hidden=hidden, gates=gates)
    return steps.gru(gates, deter)


def one_step_backward(
    w: SequenceWeights, steps: Steps, trace: Trace, back: Trace, t: int, d_deter: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the state and of the sample before, from that of the state."""
    d_gates, d_old = steps.gru_backward(trace["gates"][t], trace["old"][t], d_deter)
    d_hidden = torch.bmm(d_gates, w.gates.transpose(1, 2))
    d_before = steps.norm_silu_backward(trace["hidden_before"][t], w.hidden_gain, d_hidden)
    d_inputs = as_rows(d_before) @ w.hidden_inputs.t()
    d_own = as_rows(torch.bmm(d_before, w.hidden_own.transpose(1, 2)))
    d_by_deter, d_by_stoch, d_by_action = (part.contiguous() for part in d_inputs.chunk(3, 1))
    d_deter_before = steps.norm_silu_backward(trace["deter_before"][t], w.deter_gain, d_by_deter)
    d_stoch_before = steps.norm_silu_backward(trace["stoch_before"][t], w.stoch_gain, d_by_stoch)
    back.add(gates=d_gates, hidden=d_hidden, hidden_before=d_before, by_action=d_by_action, by_deter=d_by_deter)
    back.add(by_stoch=d_by_stoch, deter_before=d_deter_before, stoch_before=d_stoch_before)
    return d_old + torch.addmm(d_own, d_deter_before, w.deter).float(), d_stoch_before @ w.stoch


def weight_gradients(w: SequenceWeights, steps: Steps, trace: Trace, back: Trace) -> list[Tensor]:
    """The gradients of `parameters`, each from all steps at once."""
    rows, blocks = trace.rows, trace.blocks
    d_deter, d_stoch, d_hidden = back.rows("deter_before"), back.rows("stoch_before"), back.blocks("hidden_before")
    d_gates, d_logits, d_posterior = back.blocks("gates"), back.rows("logits"), back.rows("posterior_before")
    low, inputs = rows("low"), rows("inputs")
    d_own = torch.bmm(as_blocks(low, BLOCKS).transpose(1, 2), d_hidden)
    d_by_inputs = (inputs.t() @ as_rows(d_hidden)).view(inputs.shape[1], BLOCKS, -1).transpose(0, 1)
    gain = steps.norm_silu_gain
    return [
        d_deter.t() @ low,
        d_deter.float().sum(0),
        gain(rows("deter_before"), w.deter_gain, back.rows("by_deter")),
        d_stoch.t() @ rows("old_stoch"),
        d_stoch.float().sum(0),
        gain(rows("stoch_before"), w.stoch_gain, back.rows("by_stoch")),
        torch.cat([d_own, d_by_inputs], 1),
        d_hidden.float().sum(1).flatten(),
        gain(blocks("hidden_before"), w.hidden_gain, back.blocks("hidden")).flatten(),
        torch.bmm(blocks("hidden").transpose(1, 2), d_gates),
        d_gates.float().sum(1).flatten(),
        d_posterior.t() @ rows("deter").to(d_posterior.dtype),
        gain(rows("posterior_before"), w.posterior_gain, back.rows("posterior")),
        d_logits.t() @ rows("posterior"),
        d_logits.float().sum(0),
    ]
