"""Files behind addresses such as s3://bucket/x.npy: listed, fetched and kept in a bounded cache."""
