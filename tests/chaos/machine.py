"""The slowness of this machine at the start of a campaign: leases are as long as it needs."""

from tests.slowness import slowness

SLOWNESS = slowness()
