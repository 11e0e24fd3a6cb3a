"""What each picture on the page is, in two sentences."""

EXPLANATIONS = """
**Prediction.** The bars are the probabilities that a model gives to each class for the image as it is
turned now; the thin mark is where each stood upright. A p4 network keeps its answer after a quarter turn,
exactly if it pools instead of striding; a planar one need not.

**Window.** The frame on the image is the neighbourhood that the chosen layer looks at around the pixel that
you clicked. In deeper layers the map is smaller, so its cells and its window cover more of the image.

**V, the neighbourhood.** These are the values V of one channel inside the window, computed from the
features below the layer. In a p4 network features exist in four rotations, so there are four small windows,
in the order of the rows: 0° and 90° above, 180° and 270° below.

**ψ, the template.** A fixed filter that was learned, the same at every pixel. In a p4 network each row is
the same template turned by a quarter, and its four parts read the four rotations.

**α, the scores.** How much the pixel attends to each neighbour: they depend on the image and add up to 1.
Dark blue is none, yellow the most.

**α·ψ, the effective filter.** The template reweighted by the scores, which is the filter that this pixel
really uses. Click elsewhere and it changes, while ψ stays.

**α·β, the positional term.** What the learned positions β add, reweighted by the same scores. The sum of
(α·ψ)·V and of α·β is the number under *output*.

**α of every head.** Each head of a layer has scores of its own, one column each. A row is a rotation, and
all pictures share one scale.

**Feature maps.** One channel of what the layer passes on, for the upright image and for the turned one. In
a p4 network the maps turn and move on by one rotation for each quarter turn; in a planar one they become
others.

**Curves.** Loss and accuracy after every epoch of training. Validation images are held out and never
trained on.

Colours: orange is negative, violet positive, white zero; each column is scaled by its largest value,
printed below it.
"""
