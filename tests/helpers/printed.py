"""What the paper prints."""

PAPER = {  # parameters of its networks in thousands, for 10 and 100 classes
    "resnet29": (313, 336),
    "resnet29_se": (347, None),
    "p4resnet29": (310, 321),
    "p4resnet29_se": (342, 354),
    "resnet29_sasa": (235, None),
    "resnet29_simple_asc": (217, 240),
    "resnet29_asc": (268, 291),
    "resnet29_asc_se": (301, None),
    "p4resnet29_asc": (272, 283),
}
