// Receiver of complete buckets during backward.

#pragma once

#include <cstdint>

namespace fddp {

class BucketListener {
 public:
  virtual ~BucketListener() = default;

  // Called without the GIL when all expected gradients of a bucket have arrived. Must not throw:
  // backward has to run to its end.
  virtual void bucket_ready(int64_t bucket) = 0;
};

}  // namespace fddp
