"""A small residual network with batch normalisation: what has buffers that training writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Residual blocks of 3x3 convolutions, each followed by batch normalisation; a linear head.

    Args:
        widths: channels of the stages; each but the first halves the image.
        blocks: number of blocks in a stage.
        classes: to tell apart; the i-th image of a batch belongs to class i modulo that.
    """

    def __init__(self, widths: tuple[int, ...], blocks: int, classes: int) -> None:
        super().__init__()
        self._classes = classes
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        stages: list[nn.Module] = []
        width_in = widths[0]
        for width in widths:
            for block in range(blocks):
                stride = 2 if block == 0 and width != widths[0] else 1
                stages.append(_Block(width_in, width, stride))
                width_in = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Mean cross-entropy for images of shape (n, 3, height, width)."""
        x = self.stages(F.relu(self.norm(self.stem(images))))
        logits = self.head(x.mean(dim=(2, 3)))
        return F.cross_entropy(
            logits, torch.arange(len(images), device=images.device) % self._classes
        )


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if width_in != width:
            self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        deeper = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(deeper + self.shortcut(x))
