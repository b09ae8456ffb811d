"""Examples and groups of commands for ``--help``."""

COMMAND_GROUPS: dict[str, tuple[str, ...]] = {
    "Start here": ("doctor", "bench", "report", "list", "show"),
    "Use a model": ("predict", "evaluate", "export", "cite"),
    "Data and splits": ("data", "partition"),
    "Papers": ("papers", "reproduce", "compare", "claims"),
    "Tune and publish": ("tune", "leaderboard", "submit"),
    "Extend and deploy": ("new", "site"),
}
"""Heading -> commands below it, in the order of ``fczoo --help``."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "fczoo": (
        ("fczoo bench --methods pilora,hgp,fppl", "a first table, on digits, in about a minute"),
        ("fczoo report results", "the tables of all runs again"),
    ),
    "bench": (
        ("fczoo bench --methods pilora,hgp", "two methods on digits"),
        ("fczoo bench --methods all --dataset cifar100 --seeds 0-2", "all methods, three seeds"),
        ("fczoo bench --methods hgp --partition dirichlet:0.1", "another split over clients"),
        ("fczoo bench --methods hgp --set hgp.lr=0.01", "another option of a method"),
        (
            "fczoo bench --protocol hgp --dataset cifar100 --dry-run",
            "the cost of a paper's settings",
        ),
        ("fczoo bench --resume", "continue the newest run in results/"),
    ),
    "tune": (
        ("fczoo tune --methods hgp --dataset cifar100 --out tuned", "search the options of HGP"),
    ),
    "report": (
        ("fczoo report results/run-1", "the tables of a run folder"),
        ("fczoo report results --html page.html", "one page with figures"),
    ),
    "predict": (
        ("fczoo predict results/run-1/hgp/seed0 photo.png", "the five best classes of an image"),
        ("fczoo predict results/run-1 'scans/*.png' --format csv > scans.csv", "a table in a file"),
    ),
    "evaluate": (
        ("fczoo evaluate results/run-1/hgp/seed0", "the run's last evaluation again"),
        ("fczoo evaluate results/run-1/hgp/seed0 --data-root DIR", "other labelled images"),
    ),
    "export": (
        ("fczoo export results/run-1/fedavg/seed0 --format timm", "weights for timm.create_model"),
        ("fczoo export results/run-1/hgp/seed0 --format torch --out hgp.pt2", "a program of torch"),
    ),
    "cite": (("fczoo cite hgp,pilora", "BibTeX of two methods and of fczoo"),),
    "leaderboard": (("fczoo leaderboard results --out site", "a site of all runs below results"),),
    "submit": (("fczoo submit results/run-1 --dry-run", "check a run folder"),),
    "partition": (
        ("fczoo partition --dataset digits --partition dirichlet:0.1", "images per client"),
    ),
    "data": (("fczoo data fetch cifar100", "download CIFAR-100"),),
    "fetch": (("fczoo data fetch cifar100 --data-root DIR", "download CIFAR-100 into DIR"),),
    "check": (("fczoo data check cifar100", "compare a copy with the official numbers"),),
    "papers": (("fczoo papers hgp T1", "one printed table"),),
    "compare": (("fczoo compare results/run-1 --paper hgp", "a run next to the paper's numbers"),),
    "reproduce": (("fczoo reproduce hgp/cifar100/dirichlet:0.05", "run and judge a printed row"),),
    "claims": (("fczoo claims", "all claims, with the verdict of the runs here"),),
    "list": (("fczoo list methods", "all methods, by group"),),
    "show": (("fczoo show hgp", "options, what is trained, what is sent"),),
    "doctor": (("fczoo doctor", "what this machine has, and what is missing"),),
    "new": (("fczoo new method mine", "a package fczoo-mine with a method to edit"),),
    "site": (("fczoo site init OUT --agreed DIR --address HOST:9092", "folders for all sites"),),
    "init": (("fczoo site init OUT --agreed DIR --address HOST:9092", "folders for all sites"),),
    "job": (("fczoo site job OUT --agreed DIR", "a job for NVIDIA FLARE"),),
    "start": (("fczoo site start FOLDER --images DIR", "take part as the site of FOLDER"),),
    "status": (("fczoo site status FOLDER", "the state of the server's run"),),
}
"""Command -> example commands, each with its effect."""

COMMON = frozenset(
    [
        *("--config", "--methods", "--seeds", "--set", "--tuned"),
        *("--trials", "--first-tasks", "--seed", "--plot"),
        *(
            "--dataset",
            "--data-root",
            "--download",
            "--tasks",
            "--train-per-class",
            "--test-per-class",
        ),
        *("--partition", "--clients", "--participation"),
        *("--protocol", "--backbone", "--image-size", "--rounds", "--epochs", "--batch-size"),
        *("--device", "--precision", "--aggregator", "--attack"),
        *("--out", "--resume", "--dry-run", "--jobs"),
    ]
)
"""Options of long commands that ``--help`` lists; ``--help-all`` lists the others as well."""
