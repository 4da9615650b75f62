"""Each op of a round in numpy float64, written from its definition and from nothing else."""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rope(x, position, theta):
    """x (..., D) at one position: dimension d turns with d + D/2."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def short_conv(bcx, taps, bias=None):
    """One stream from position 0: bcx (T, 3 C), taps (C, L)."""
    b, c, x = np.split(bcx, 3, axis=1)
    num_taps = taps.shape[1]
    u = np.concatenate([np.zeros((num_taps - 1, b.shape[1])), b * x])
    v = sum(u[j : j + len(b)] * taps[:, j] for j in range(num_taps))
    return c * (v if bias is None else v + bias)


def attend(q, keys, values, scale):
    """One row: q (H, D), keys and values (n, K, D)."""
    num_heads, num_kv_heads = q.shape[0], keys.shape[1]
    out = np.zeros(q.shape)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = keys[:, kv_head] @ q[head] * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ values[:, kv_head]
    return out


def route(logits, bias, num_active, is_normalised, scale):
    """One row: the chosen experts, best first, and their weights."""
    scores = 1 / (1 + np.exp(-logits))
    chosen = np.argsort(-(scores + bias), kind="stable")[:num_active]
    weights = scores[chosen]
    return chosen, weights / (weights.sum() + 1e-6 if is_normalised else 1) * scale
