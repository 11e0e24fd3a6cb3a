"""``selfconv explore``: a page on this machine that shows what a trained network does with an image.

_comparison      models, samples, and what the models compute for an image (remembered)
_uploads    image files from others: checked before they are decoded
_pictures   numbers as small pictures and HTML
_curves     how training went, as SVG
_view       every part of the page, from what the user has chosen
_page       the page: its controls and what they change (_style, _explained)
_server     who may ask the server for what; starting and ending it
"""

from selfconv.explorer._server import explore

__all__ = ["explore"]
