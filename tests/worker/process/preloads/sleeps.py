"""A module that takes long to import."""

import select

select.select([], [], [], 60)
