"""Parameters of the paper's networks: exact, and as the paper prints them."""

_PARAMETERS = {  # exact for 10 and 100 classes, then in thousands as printed
    "resnet29": (313_114, 336_244, 313, 336),
    "resnet29_se": (346_798, None, 347, None),
    "p4resnet29": (309_138, 320_748, 310, 321),
    "p4resnet29_se": (342_234, 353_844, 342, 354),
    "resnet29_sasa": (235_162, None, 235, None),
    "resnet29_simple_asc": (217_354, 240_484, 217, 240),
    "resnet29_asc": (267_754, 290_884, 268, 291),
    "resnet29_asc_se": (301_438, None, 301, None),
    "p4resnet29_asc": (271_842, 283_452, 272, 283),
}
EXACT = {name: counts[:2] for name, counts in _PARAMETERS.items()}
PAPER = {name: counts[2:] for name, counts in _PARAMETERS.items()}
