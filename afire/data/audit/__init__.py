"""The audit of a set before any training: what is broken, what is double, and what gives the label away.

Knows manifests and pixels; knows no network and no page.
"""

from afire.data.audit.measure import Finding
from afire.data.audit.run import Audit, as_report, audit_manifest, write_audit
from afire.data.audit.shortcuts import Shortcut

__all__ = ["Audit", "Finding", "Shortcut", "as_report", "audit_manifest", "write_audit"]
