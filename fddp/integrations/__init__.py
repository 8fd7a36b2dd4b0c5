"""fddp within training frameworks. Each module imports its framework; this one imports none."""

from fddp.integrations.replace_ddp import install as install
from fddp.integrations.token_mean import TokenMean as TokenMean
