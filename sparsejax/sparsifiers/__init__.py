"""Sparsifiers, which select the elements to send, one file each; `base` is the contract."""

from sparsejax.sparsifiers.base import Draw as Draw, Sparsifier as Sparsifier
from sparsejax.sparsifiers.by_estimate.dgc import DGC as DGC
from sparsejax.sparsifiers.by_estimate.dragonn import Dragonn as Dragonn
from sparsejax.sparsifiers.by_estimate.gaussian_k import GaussianK as GaussianK
from sparsejax.sparsifiers.densities import Schedule as Schedule, Warmup as Warmup
from sparsejax.sparsifiers.ms_top_k import MSTopK as MSTopK
from sparsejax.sparsifiers.reuse_threshold import ReuseThreshold as ReuseThreshold
from sparsejax.sparsifiers.rounding.qsgd import QSGD as QSGD
from sparsejax.sparsifiers.rounding.sign import Sign as Sign
from sparsejax.sparsifiers.rounding.visible import Visible as Visible
from sparsejax.sparsifiers.shared.random_k import RandomK as RandomK
from sparsejax.sparsifiers.shared.striding import Striding as Striding
from sparsejax.sparsifiers.threshold import Threshold as Threshold
from sparsejax.sparsifiers.top_k import TopK as TopK
