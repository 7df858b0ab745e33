"""Defines a small UNet that predicts the noise in pictures, the pictures, and the sampling from noise, in plain
PyTorch.

B: pictures. H, W: height and width. C: channels of an activation. D: size of the time encoding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIXELS, TIMES, WIDTHS = 16, 200, (32, 64, 128)
SHADES = " .:-=+*#@"


class Block(nn.Module):
    """Two convolutions around a time-dependent shift, with a residual connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)])
        self.convolutions = nn.ModuleList([nn.Conv2d(width, outputs, 3, padding=1) for width in (inputs, outputs)])
        self.shift = nn.Linear(WIDTHS[-1], outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Applies the block to x, [B, C, H, W], at time, [B, D], both in the model's dtype. Returns [B, C', H, W]."""
        hidden = self.convolutions[0](F.silu(self.norms[0](x))) + self.shift(time)[:, :, None, None]
        return self.skip(x) + self.convolutions[1](F.silu(self.norms[1](hidden)))


class UNet(nn.Module):
    """A block at each resolution on the way down and up, with skip connections between them."""

    def __init__(self) -> None:
        super().__init__()
        first, *_, last = WIDTHS
        steps = [*zip(WIDTHS, WIDTHS[1:])]
        self.time = nn.Sequential(nn.Linear(last, last), nn.SiLU(), nn.Linear(last, last))
        self.enter = nn.Conv2d(1, first, 3, padding=1)
        self.down = nn.ModuleList([Block(wide, wider) for wide, wider in steps])
        self.middle = Block(last, last)
        self.up = nn.ModuleList([Block(wider + wider, wide) for wide, wider in reversed(steps)])
        self.leave = nn.Conv2d(first, 1, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Predicts the noise in x, [B, 1, H, W], in the model's dtype. times: [B], int64.

        Returns [B, 1, H, W], fp32.
        """
        x = self.enter(x.contiguous(memory_format=torch.channels_last))
        time = self.time(_waves(times).to(x.dtype))
        seen = []
        for block in self.down:
            x = block(x, time)
            seen.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat((x, seen.pop()), dim=1), time)
        return self.leave(x).float()


def _waves(times: Tensor) -> Tensor:
    """Encodes the times, [B], int64, as sines and cosines: [B, D], fp32."""
    count = WIDTHS[-1] // 2
    angles = times[:, None] * torch.exp(torch.arange(count) * (-math.log(10 * TIMES) / count))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def signal(times: Tensor) -> Tensor:
    """Returns the fraction of a picture's power that remains at each time, any shape, int64, as fp32 from 1 to 0."""
    return torch.cos((times + 1) / (TIMES + 1) * math.pi / 2).square()


def draw_pictures(count: int, *, generator: torch.Generator) -> Tensor:
    """Draws rings of random size and position, bright on dark: [count, 1, PIXELS, PIXELS], fp32, between -1 and 1."""
    place, size = torch.rand(2, count, 1, 1, generator=generator), torch.rand(count, 1, 1, generator=generator)
    row, column = 5 + 6 * place
    grid = torch.arange(PIXELS)
    distance = ((grid[:, None] - row).square() + (grid - column).square()).sqrt()
    return torch.tanh(2 - 2 * (distance - 2.5 - 2 * size).abs())[:, None]


def add_noise(pictures: Tensor, *, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Adds noise to pictures, [B, 1, H, W], fp32.

    Returns the noisy pictures; the times, [B], int64; and the noise, in the shape of the pictures.
    """
    times = torch.randint(TIMES, (len(pictures),), generator=generator)
    noise = torch.randn(pictures.shape, generator=generator)
    left = signal(times)[:, None, None, None]
    return left.sqrt() * pictures + (1 - left).sqrt() * noise, times, noise


@torch.no_grad()
def paint(model: nn.Module, count: int, *, dtype: torch.dtype, steps: int = 20) -> Tensor:
    """Generates pictures from noise with the model: [count, 1, PIXELS, PIXELS], fp32."""
    x = torch.randn(count, 1, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    for time in torch.linspace(TIMES - 1, 0, steps).long():
        left = signal(time)
        noise = model(x.to(dtype), time.expand(count))
        picture = ((x - (1 - left).sqrt() * noise) / left.sqrt()).clamp(-1, 1)
        after = signal(time - TIMES // steps).clamp(max=1) if time > 0 else torch.ones(())
        x = after.sqrt() * picture + (1 - after).sqrt() * noise
    return x


def as_text(pictures: Tensor) -> str:
    """Formats pictures, [B, 1, H, W], fp32, between -1 and 1, side by side as characters."""
    shades = ((pictures[:, 0] + 1) / 2 * (len(SHADES) - 1)).round().long()
    rows = shades.permute(1, 0, 2).tolist()
    return "\n".join("  ".join("".join(SHADES[shade] * 2 for shade in part) for part in row) for row in rows)
