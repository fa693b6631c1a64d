"""Codes of the values of selected entries: `base` has the contract, `codes` the table."""

from sparsejax.wire.value_codes.base import ValueCode as ValueCode
from sparsejax.wire.value_codes.codes import (
    CODES as CODES,
    code_of as code_of,
    coded as coded,
)
from sparsejax.wire.value_codes.messages import CodedMessages as CodedMessages
