"""``selfconv explore``: a page on this machine that shows what a trained network does with an image, and why.

_comparison   models, samples, and what the models compute for an image (remembered)
_answers      the answer to each interaction, in numbers
_server       who may ask the server for what; starting and ending it
static/       the page: it draws the numbers
"""

from selfconv.explorer._server import explore

__all__ = ["explore"]
