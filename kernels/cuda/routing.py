"""Expert routing with torch ops."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..reference_moe import MIN_SUM, Routing


def routed(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_moe.route` on tensors."""
    scores = logits.sigmoid() if routing.sigmoid else functional.softplus(logits).sqrt() if routing.sqrt_softplus else logits.softmax(1)
    by = logits if correction is None else (logits if routing.correction_on_logits else scores) + correction
    if routing.top_groups < routing.num_groups:
        grouped = by.view(len(by), routing.num_groups, -1)
        of_group = grouped.amax(2) if correction is None else grouped.topk(2, 2).values.sum(2)
        left_out = of_group.sort(dim=1, descending=True, stable=True).indices[:, routing.top_groups :]
        dropped = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, left_out, True)
        by = grouped.masked_fill(dropped[..., None], -torch.inf).view(by.shape)
    chosen = by.sort(dim=1, descending=True, stable=True).indices[:, : routing.experts_per_token].sort(dim=1).values
    if routing.sparsemixer_margin is not None:
        chosen_logits, all_logits = logits.gather(1, chosen)[..., None], logits[:, None]
        numbers = torch.arange(logits.shape[1], device=logits.device)
        counted = (all_logits < chosen_logits) | (all_logits == chosen_logits) & (numbers >= chosen[..., None])
        counted &= chosen_logits - all_logits <= routing.sparsemixer_margin * torch.maximum(all_logits.abs(), chosen_logits)
        return chosen, routing.routed_scale / (all_logits - chosen_logits).masked_fill(~counted, -torch.inf).exp().sum(2)
    shares = scores.gather(1, chosen)
    return chosen, routing.routed_scale * (shares / shares.sum(1, keepdim=True).clamp_min(MIN_SUM) if routing.renormalise else shares)
