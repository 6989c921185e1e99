"""Settings of every test: examples of a property may take as long as a loaded machine needs."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("project", deadline=None)
settings.load_profile("project")
