// Collectives that a step starts and waits for. The implementations are shared memory
// (c10d/shm_in_place.cpp), accelerators (device_collectives.cpp) and transports in Python
// (collectives.cpp).

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <string>

#include "step/profile.h"

namespace fddp {

// A collective in flight. All functions except `to_python` are called without the GIL.
class PendingCollective {
 public:
  virtual ~PendingCollective() = default;

  // Return true if `wait` would not block.
  virtual bool done() = 0;

  // Block until the collective has finished, or for a short time. Return true if it has succeeded.
  // Otherwise the handle for Python finds out why, and waits longer if necessary. `what` describes
  // the collective for errors.
  virtual bool wait(const std::function<std::string()>& what) = 0;

  // Return true if `wait` records the time it takes, for telemetry/waits.py.
  virtual bool notes_waits() const { return false; }

  // End the range at the completion of the collective, if that can be known before it is waited for.
  virtual void end_range(std::shared_ptr<CollectiveRange> range) = 0;

  // Return the `Work` by which Python waits for the same collective. Called with the GIL.
  virtual pybind11::object to_python() = 0;
};

// Return the work of a collective that Python has started; null for None. Called with the GIL.
std::shared_ptr<PendingCollective> pending_in_python(pybind11::object work);

class Collectives {
 public:
  virtual ~Collectives() = default;

  // Return true if tensors on a device can be reduced.
  virtual bool takes(c10::Device device) const = 0;

  // Start to replace a tensor by its sum over all ranks, or by the mean with `average`. `wait_soon`:
  // backward has ended, so that the caller is about to wait. Return null if there is nothing to wait
  // for. Called without the GIL. If it throws, no collective was started, unless it is an error of Python.
  virtual std::shared_ptr<PendingCollective> all_reduce(const at::Tensor& tensor, bool average, bool wait_soon) = 0;
};

}  // namespace fddp
