"""A 200-class subset of ImageNet-1k (Russakovsky et al., 2015), the third benchmark of PILoRA."""

from pathlib import Path

from fczoo.core.errors import FczooError
from fczoo.core.registry import register_dataset
from fczoo.core.seeds import numpy_stream
from fczoo.data.dataset import Dataset, Defaults, ImageData, Official
from fczoo.data.folder_layout import find_parts
from fczoo.data.folder_scan import class_names, subfolders
from fczoo.data.image_files import read_train_test_folders

SEED = 0  # of the draw; another one is another data set


@register_dataset("imagenet_subset")
class ImageNetSubset(Dataset):
    """200 of the 1,000 classes, drawn by seed 0 from the sorted WordNet ids.

    The test images are ImageNet's validation images.

    This imitates the ImageNet-Subset of PILoRA, whose paper does not name its classes, so results
    are not exactly comparable with its numbers. ``val`` must be sorted into class folders. Class
    names come from ``LOC_synset_mapping.txt`` where it is in the folder. The cache of all images
    needs about 50 GB; ``--stored-size`` and ``--train-per-class`` reduce this.
    """

    classes = 200
    folder = "imagenet"
    source = "ImageNet-1k (image-net.org, after registration; its terms forbid automatic download)"
    layout = "imagenet/{train,val}/CLASS/*.JPEG with all 1,000 classes"
    licence = "ImageNet's terms: non-commercial research and education"
    official = Official(None, 10_000, None, 50)
    overlaps = {"tinyimagenet": "some", "imagenet1k": "all"}
    about = "200 classes of ImageNet-1k drawn by seed, kept at 256x256"
    defaults = Defaults()

    def load(self, root: Path) -> ImageData:
        folder = self.locate(root)
        ids = subfolders(folder / "train")
        if len(ids) != 1000:
            problem = f"{folder / 'train'} has {len(ids)} class folders"
            advice = f"for another subset give --dataset imagefolder --data-root {folder}"
            raise FczooError(f"{problem}; the draw needs all 1,000 of ImageNet-1k; {advice}")
        positions = numpy_stream("imagenet subset", SEED).permutation(1000)[: self.classes]
        chosen = sorted(ids[i] for i in positions)
        names = class_names(chosen, folder / "LOC_synset_mapping.txt")
        train, test, remarks = find_parts(folder) or (folder / "train", None, ())
        data = read_train_test_folders(self.name, train, test or folder / "val", 256, names, chosen)
        return data._replace(remarks=(*remarks, *data.remarks))
