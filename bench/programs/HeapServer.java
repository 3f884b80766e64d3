// SPDX-License-Identifier: MIT OR Apache-2.0

import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.util.SplittableRandom;

/**
 * A server that sweeps its heap: it holds many small arrays and answers each request with a checksum of all of them.
 *
 * <p>Usage: HeapServer SOCKET MIB. It listens on the unix socket SOCKET once MIB MiB of arrays are filled. A client
 * connects, sends one line and reads one line.
 */
final class HeapServer {
    /** Longs of one array: 4 KiB. */
    private static final int LONGS = 512;

    public static void main(String[] arguments) throws Exception {
        long[][] arrays = filled(Integer.parseInt(arguments[1]) * 256);
        // What the filling left behind is not part of the program.
        System.gc();
        ByteBuffer request = ByteBuffer.allocate(64);
        try (ServerSocketChannel listener = ServerSocketChannel.open(StandardProtocolFamily.UNIX)) {
            listener.bind(UnixDomainSocketAddress.of(arguments[0]));
            while (true) {
                try (SocketChannel connection = listener.accept()) {
                    request.clear();
                    connection.read(request);
                    String answer = Long.toHexString(checksum(arrays)) + "\n";
                    connection.write(ByteBuffer.wrap(answer.getBytes(StandardCharsets.US_ASCII)));
                }
            }
        }
    }

    private static long[][] filled(int count) {
        SplittableRandom random = new SplittableRandom(count);
        long[][] arrays = new long[count][LONGS];
        for (long[] array : arrays) {
            for (int at = 0; at < LONGS; at++) {
                array[at] = random.nextLong();
            }
        }
        return arrays;
    }

    /** Depends on each element and on their order. */
    private static long checksum(long[][] arrays) {
        long sum = 0;
        for (long[] array : arrays) {
            for (long element : array) {
                sum = sum * 31 + element;
            }
        }
        return sum;
    }
}
