"""Loss scales, noise scales and norm spikes, as pure functions of values that all ranks share.

LossScale, next_loss_scale               loss scale, as a value
NoiseScale, next_noise_scale             gradient noise scale, as a value
SquaredNorms                             norms of one step, from which it is estimated
check_norm, NormHistory, NormVerdict     detection of spikes in the gradient norm
"""

from fddp.core.numerics.loss_scale import LossScale as LossScale
from fddp.core.numerics.loss_scale import next_loss_scale as next_loss_scale
from fddp.core.numerics.noise_scale import NoiseScale as NoiseScale
from fddp.core.numerics.noise_scale import SquaredNorms as SquaredNorms
from fddp.core.numerics.noise_scale import next_noise_scale as next_noise_scale
from fddp.core.numerics.norm_spikes import NormHistory as NormHistory
from fddp.core.numerics.norm_spikes import NormVerdict as NormVerdict
from fddp.core.numerics.norm_spikes import check_norm as check_norm
