"""The mesh oracle: the sharded step against plain formulas on one device."""

from jaxscale.verify.cases import Case
from jaxscale.verify.compare import CaseResult
from jaxscale.verify.verification import Verification, verify_model

__all__ = ["Case", "CaseResult", "Verification", "verify_model"]
