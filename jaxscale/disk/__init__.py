"""Files that are whole or absent, and on the disk once we say so."""

from jaxscale.disk.durable import sync_to_disk, write_whole

__all__ = ["sync_to_disk", "write_whole"]
