from torchcalib.losses.base import PenaltyLoss as PenaltyLoss
from torchcalib.losses.binned import ECELoss as ECELoss
from torchcalib.losses.binned import SoftBinnedECELoss as SoftBinnedECELoss
from torchcalib.losses.binned import soft_binned_ece as soft_binned_ece
from torchcalib.losses.kernel import CanonicalLoss as CanonicalLoss
from torchcalib.losses.kernel import MMCELoss as MMCELoss
from torchcalib.losses.kernel import SKCELoss as SKCELoss
from torchcalib.losses.kernel import mmce as mmce
