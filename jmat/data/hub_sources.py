"""Says where the corpora of the hub are: one table, with fixed revisions."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Source:
    """Holds the place of a corpus on the hub: `shards` parquet files with a column
    `text`, numbered where `path` has `{}`.
    """

    about: str
    repo: str
    revision: str
    path: str
    shards: int
    # or a "line" of WikiText, where titles begin documents and tokens stand apart
    row_is: str = "document"

    def address(self, shard: int) -> str:
        """Returns the address of one file, as `datasets` and `fsspec` read it."""
        return f"hf://datasets/{self.repo}@{self.revision}/{self.path.format(shard)}"


SOURCES = {
    "wikipedia": Source(
        "English Wikipedia of 2023-11-01",
        "wikimedia/wikipedia",
        "b04c8d1ceb2f5cd4588862100d08de323dccfbaa",
        "20231101.en/train-{:05d}-of-00041.parquet",
        41,
    ),
    "wikipedia-2022": Source(
        "English Wikipedia of 2022-03-01, as in the paper",
        "legacy-datasets/wikipedia",
        "97a0b052c326b45fb68593a14972d9eed884cd17",
        "data/20220301.en/train-{:05d}-of-00041.parquet",
        41,
    ),
    "cc-news": Source(
        "English news of 2017 to 2019 from Common Crawl",
        "vblagoje/cc_news",
        "81eb2ce0d2a9dad6ad16b68ef750ec290880fa36",
        "plain_text/train-{:05d}-of-00005.parquet",
        5,
    ),
    "wikitext-103": Source(
        "good and featured articles of English Wikipedia, 2016",
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        "wikitext-103-raw-v1/train-{:05d}-of-00002.parquet",
        2,
        row_is="line",
    ),
}
