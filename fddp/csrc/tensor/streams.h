// Streams of accelerators.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

namespace fddp {

inline bool has_streams(c10::Device device) { return !device.is_cpu() && !device.is_meta(); }

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Let the current streams wait for what these have been given.
inline void wait_for(const std::vector<c10::Stream>& streams) {
  for (const c10::Stream& stream : streams) {
    const c10::Stream current = current_stream(stream.device());
    if (current == stream) continue;
    c10::Event event(stream.device_type());
    event.record(stream);
    event.block(current);
  }
}

}  // namespace fddp
