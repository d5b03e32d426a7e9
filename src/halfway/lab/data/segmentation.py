"""Pictures with masks: PASCAL VOC 2012, Cityscapes, or a user's own folder."""

from __future__ import annotations

from pathlib import Path

from .base import IGNORE
from .settings import DataSettings
from .sources import DatasetSources, MaskedFiles, missing

VOC_NAMES = [
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "dining table",
    "dog",
    "horse",
    "motorbike",
    "person",
    "potted plant",
    "sheep",
    "sofa",
    "train",
    "tv monitor",
]

# The classes that count in Cityscapes' benchmark, in the order of their training ids, with the ids in its files.
CITYSCAPES = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
CITYSCAPES_NAMES = list(CITYSCAPES)
_CITYSCAPES_IDS = list(CITYSCAPES.values())
# The class for each of the 256 values a label file can have.
CITYSCAPES_TABLE = [_CITYSCAPES_IDS.index(i) if i in _CITYSCAPES_IDS else IGNORE for i in range(256)]


def voc2012(settings: DataSettings, root: Path) -> DatasetSources:
    """Trains on the split train or trainaug (with SBD's masks), tests on val."""
    folder = voc_folder(root)
    if folder is None:
        raise missing(
            "VOCdevkit/VOC2012/",
            root,
            f"`halfway data voc2012 --to {root}` downloads it. Or get it from "
            "http://host.robots.ox.ac.uk/pascal/VOC/voc2012: unpack VOCtrainval_11-May-2012.tar there, so that it "
            "looks like\n"
            f"    {root}/VOCdevkit/VOC2012/JPEGImages/*.jpg\n"
            f"    {root}/VOCdevkit/VOC2012/SegmentationClass/*.png\n"
            f"    {root}/VOCdevkit/VOC2012/ImageSets/Segmentation/train.txt, val.txt",
        )
    more = settings.split == "trainaug"
    if more and trainaug_folder(root) is None:
        raise missing(
            "SegmentationClassAug/ and ImageSets/Segmentation/trainaug.txt",
            folder,
            "data.split=trainaug trains on 10,582 images, most of them with masks of the Semantic Boundaries Dataset "
            f"(SBD, benchmark.tgz). `halfway data sbd --to {root}` downloads them and converts them to\n"
            f"    {folder}/SegmentationClassAug/*.png\n"
            f"    {folder}/ImageSets/Segmentation/trainaug.txt\n"
            "data.split=train needs the 1,464 official masks only.",
        )
    train = _voc(folder, settings.split, "SegmentationClassAug" if more else "SegmentationClass")
    title = "PASCAL VOC 2012 with SBD's masks" if more else "PASCAL VOC 2012"
    return DatasetSources(title, VOC_NAMES, train, _voc(folder, "val", "SegmentationClass"))


def voc_folder(root: Path) -> Path | None:
    """The folder in `root` that holds VOC 2012; None if there is none."""
    places = (root / "VOCdevkit" / "VOC2012", root / "VOC2012", root)
    return next((f for f in places if (f / "JPEGImages").is_dir()), None)


def trainaug_folder(root: Path) -> Path | None:
    """The folder of VOC 2012, if it has the masks of SBD."""
    folder = voc_folder(root)
    if folder is None or not ((folder / "SegmentationClassAug").is_dir() and voc_list(folder, "trainaug").is_file()):
        return None
    return folder


def voc_list(folder: Path, split: str) -> Path:
    """The file that names the images of a split."""
    return folder / "ImageSets" / "Segmentation" / f"{split}.txt"


def _voc(folder: Path, split: str, masks: str) -> MaskedFiles:
    names = voc_list(folder, split).read_text().split()
    return MaskedFiles(
        [folder / "JPEGImages" / f"{n}.jpg" for n in names],
        [folder / masks / f"{n}.png" for n in names],
        len(VOC_NAMES),
    )


def cityscapes(settings: DataSettings, root: Path) -> DatasetSources:
    """The fine annotations, with the benchmark's 19 classes."""
    if cityscapes_folder(root) is None:
        raise missing(
            "leftImg8bit/train/ and gtFine/train/",
            root,
            "Cityscapes comes from https://www.cityscapes-dataset.com, after registration (`halfway data cityscapes` "
            "has the steps): unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip there, so that it looks "
            "like\n"
            f"    {root}/leftImg8bit/{{train,val}}/<city>/*_leftImg8bit.png\n"
            f"    {root}/gtFine/{{train,val}}/<city>/*_gtFine_labelIds.png",
        )
    return DatasetSources("Cityscapes, fine annotations", CITYSCAPES_NAMES, _city(root, "train"), _city(root, "val"))


def cityscapes_folder(root: Path) -> Path | None:
    """The folder in `root` that holds Cityscapes; None if there is none."""
    return root if (root / "leftImg8bit" / "train").is_dir() and (root / "gtFine" / "train").is_dir() else None


def _city(root: Path, part: str) -> MaskedFiles:
    # Sorted, because sample ids must not depend on the order in which the file system lists files.
    images = sorted((root / "leftImg8bit" / part).glob("*/*_leftImg8bit.png"))
    if not images:
        raise FileNotFoundError(f"no images in {root}/leftImg8bit/{part}: unpack leftImg8bit_trainvaltest.zip again")
    masks = [
        root / "gtFine" / part / path.parent.name / path.name.replace("_leftImg8bit.png", "_gtFine_labelIds.png")
        for path in images
    ]
    return MaskedFiles(images, masks, len(CITYSCAPES), CITYSCAPES_TABLE)


def segmentation_folder(settings: DataSettings, root: Path) -> DatasetSources:
    """`root/{train,val}/images/*` and `root/{train,val}/masks/*.png`; `root/classes.txt` may name the classes."""
    names = root / "classes.txt"
    classes = (
        [line.strip() for line in names.read_text().splitlines() if line.strip()]
        if names.is_file()
        else [f"class {i}" for i in range(settings.classes)]
    )
    sources = (_own(root, part, settings.classes) for part in ("train", "val"))
    return DatasetSources(f"images in {root.resolve().name}", classes, *sources)


def _own(root: Path, part: str, classes: int) -> MaskedFiles:
    folder = root / part
    images = sorted(p for p in (folder / "images").glob("*") if p.is_file() and not p.name.startswith("."))
    if not images:
        raise missing(
            f"{part}/images/*",
            root,
            "A folder of images with masks has a PNG mask of the same name for each image:\n"
            f"    {root}/{{train,val}}/images/one.jpg\n"
            f"    {root}/{{train,val}}/masks/one.png\n"
            f"A mask's pixel is the number of its class, from 0, or {IGNORE} to ignore it. classes.txt in {root} may "
            "name the classes, one per line.",
        )
    masks = [folder / "masks" / f"{p.stem}.png" for p in images]
    if absent := [m for m in masks if not m.is_file()]:
        raise FileNotFoundError(f"{len(absent)} images have no mask; the first is missing at {absent[0]}")
    return MaskedFiles(images, masks, classes)
