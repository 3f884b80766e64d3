// SPDX-License-Identifier: MIT OR Apache-2.0

import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;

/**
 * A server with a large heap: a request reads many small arrays, one after another.
 *
 * <p>Usage: HeapServer SOCKET MIB. It fills MIB MiB of arrays, then listens on the unix socket SOCKET. A client connects,
 * sends the line "SEED COUNT" and reads one line, a checksum. bench/src/programs/answer.rs computes the same.
 */
final class HeapServer {
    /** Longs of one array: 4 KiB. */
    private static final int LONGS = 512;

    public static void main(String[] arguments) throws Exception {
        long[][] arrays = filled(Integer.parseInt(arguments[1]) * 256);
        try (ServerSocketChannel listener = ServerSocketChannel.open(StandardProtocolFamily.UNIX)) {
            listener.bind(UnixDomainSocketAddress.of(arguments[0]));
            while (true) {
                try (SocketChannel connection = listener.accept()) {
                    String[] request = request(connection).trim().split(" ");
                    long checksum = answer(arrays, Integer.parseInt(request[0]), Integer.parseInt(request[1]));
                    String answer = Long.toUnsignedString(checksum) + "\n";
                    connection.write(ByteBuffer.wrap(answer.getBytes(StandardCharsets.US_ASCII)));
                }
            }
        }
    }

    /** A request is short and arrives in one piece. */
    private static String request(SocketChannel connection) throws Exception {
        ByteBuffer bytes = ByteBuffer.allocate(64);
        connection.read(bytes);
        return new String(bytes.array(), 0, bytes.position(), StandardCharsets.US_ASCII);
    }

    private static long[][] filled(int count) {
        long[][] arrays = new long[count][LONGS];
        for (int number = 0; number < count; number++) {
            long state = (number + 1) * 0x9E3779B97F4A7C15L;
            for (int at = 0; at < LONGS; at++) {
                state ^= state << 13;
                state ^= state >>> 7;
                state ^= state << 17;
                arrays[number][at] = state;
            }
        }
        return arrays;
    }

    /** Depends on each element that it reads and on their order. */
    private static long answer(long[][] arrays, int seed, int count) {
        long checksum = seed;
        for (int step = 0; step < count; step++) {
            for (long element : arrays[(seed + step) % arrays.length]) {
                checksum = checksum * 31 + element;
            }
        }
        return checksum;
    }
}
