"""The states of a linear-attention layer in Transformers' caches, which have changed their shape four times.

Told apart by what they have, never by a version. Convolution states are [B, channels, columns], newest column last.
"""

import torch


def _first(states):
    return states[0] if isinstance(states, dict) else states  # newer layers can hold several states


def read(cache, index):
    """(conv state, recurrent state, whether the layer keeps its past for a roll-back); None before the first tokens."""
    if cache is None:
        return None, None, False
    if hasattr(cache, "layers"):
        layer = cache.layers[index]
        previous = layer.has_previous_state
        previous = previous[0] if isinstance(previous, dict) else previous
        recording = getattr(layer, "record_past", False)
        if not previous:
            return None, None, recording
        return _first(layer.conv_states), _first(layer.recurrent_states), recording
    if hasattr(cache, "conv_states_q"):  # one state for each of three convolutions
        parts = [getattr(cache, f"conv_states_{part}")[index] for part in "qkv"]
        return None if parts[0] is None else torch.cat(parts, 1), cache.recurrent_states[index], False
    return cache.conv_states[index], cache.recurrent_states[index], False


def write(cache, index, conv_state, recurrent_state, widths=None):
    """Stores the columns that the next tokens need (all columns of the past, if the layer records it) and the state."""
    if hasattr(cache, "layers"):
        cache.update_conv_state(conv_state, index)
        cache.update_recurrent_state(recurrent_state, index)
        return
    if hasattr(cache, "conv_states_q"):
        for part, state in zip("qkv", conv_state[..., 1:].split(widths, 1), strict=True):  # one column less
            getattr(cache, f"conv_states_{part}")[index] = state
    else:
        cache.conv_states[index] = conv_state
    cache.recurrent_states[index] = recurrent_state


def record(cache, index, columns, taps, recurrent_state):
    """The same for a layer that keeps its past: all new columns."""
    cache.update_conv_state(columns, index, conv_kernel_size=taps)
    cache.update_recurrent_state(recurrent_state, index)


def in_place(cache):
    """Whether the states are the cache's own buffers, and a step may write into them."""
    return not hasattr(cache, "conv_states_q")
