"""Where data sets come from: CIFAR archives, arrays, folders and lists of images, Parquet and the Hub."""
