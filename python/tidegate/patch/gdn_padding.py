"""States of rows that end in padding: they are those after the row's last real token."""

import torch

CLOSED = -1e4  # as raw gate: no decay and nothing written, exactly, and finite in every float type


def before_end(mask):
    """[B, T]: whether a real token comes here or later. Padding in front of one is zeros, as in the original."""
    return (mask != 0).flip(1).cummax(1).values.flip(1)


def last_columns(mixed, before, mask, count):
    """The last `count` real columns of every row, [B, channels, count]; from `before`, or zeros, where there are fewer.

    mixed [B, T, channels]; before: None or [B, channels, >= count - 1]; mask [B, T], not 0 where a token is real.
    """
    B, T, channels = mixed.shape
    places = torch.arange(1, T + 1, device=mixed.device)
    ends = (places * (mask != 0)).amax(1)  # tokens up to the last real one
    wanted = ends[:, None] + torch.arange(-count, 0, device=mixed.device)  # [B, count], negative: before this call
    inside = (wanted >= 0)[..., None]
    columns = mixed.gather(1, wanted.clamp(min=0)[..., None].expand(B, count, channels))
    if before is None:
        columns = columns * inside
    else:
        held = before.shape[-1]
        older = (wanted + held).clamp(0, held - 1)[:, None].expand(B, channels, count)
        columns = torch.where(inside, columns, before.gather(2, older).transpose(1, 2))
    return columns.transpose(1, 2)
